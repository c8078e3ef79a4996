"""What follows a product and is no stage of it: it would write outside, or in another order."""

import pytest
from tvm import te, tirx
from tvm.script import tirx as T

from tir_schedules.matmul.recognise import recognise

M, ONE = te.var("m", "int64"), tirx.IntImm("int64", 1)


def product(n, follow):
    """x (m, 8) @ w (8, n), then ``follow(y)``."""
    k, n = tirx.IntImm("int64", 8), tirx.IntImm("int64", n)
    x, w = te.placeholder((M, k), name="x"), te.placeholder((k, n), name="w")
    r = te.reduce_axis((0, k), name="r")
    y = te.compute((M, n), lambda i, j: te.sum(x[i, r] * w[r, j], axis=r), name="y")
    return te.create_prim_func([x, w, follow(y)])


@pytest.mark.parametrize(
    "follow",
    [
        lambda y: te.compute((ONE, y.shape[1]), lambda i, j: y[i + 1, j]),
        lambda y: te.compute((y.shape[0], ONE), lambda i, j: y[i, j + 16]),
        lambda y: te.compute((y.shape[0], ONE), lambda i, j: y[i, j]),
    ],
    ids=["a later row", "a later column", "the first column"],
)
def test_one_row_or_column_is_not_all(follow):
    assert recognise(product(32, lambda y: te.compute(y.shape, lambda i, j: -y[i, j])))
    assert recognise(product(32, follow)) is None


@T.prim_func(s_tir=True)
def columns_written_again(
    x: T.Buffer((T.int64(4), T.int64(8)), "float32"),
    w: T.Buffer((T.int64(8), T.int64(48)), "float32"),
    out: T.Buffer((T.int64(4), T.int64(48)), "float32"),
):
    y = T.sblock_alloc_buffer((T.int64(4), T.int64(48)))
    for i, j, k in T.grid(T.int64(4), T.int64(48), T.int64(8)):
        with T.sblock("matmul"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                y[vi, vj] = T.float32(0)
            y[vi, vj] = y[vi, vj] + x[vi, vk] * w[vk, vj]
    for i, j in T.grid(T.int64(4), T.int64(32)):
        with T.sblock("left"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = y[vi, vj]
    for i, j in T.grid(T.int64(4), T.int64(32)):
        with T.sblock("right"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj + T.int64(16)] = y[vi, vj + T.int64(16)]
    for i, j in T.grid(T.int64(4), T.int64(32)):
        with T.sblock("left_again"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = -y[vi, vj]


def test_columns_are_written_once():
    """All of the left come before the right, whatever their order here."""
    assert recognise(columns_written_again) is None
