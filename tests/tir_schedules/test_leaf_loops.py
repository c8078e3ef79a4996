"""Vectors and tails on small hand-written loops: what is rewritten, what is not, same values."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T
from tvm.tirx import For, ForKind, PrimFunc

from tir_schedules.cpu.leaf_loops import vectorize_leaf_loops
from tir_schedules.cpu.small_loops import run_small_loops_serially


@T.prim_func(s_tir=True)
def scale(x: T.Buffer((37,), "float32"), y: T.Buffer((37,), "float32")):
    for i in range(37):
        with T.sblock("scale"):
            v = T.axis.spatial(37, i)
            y[v] = x[v] * T.float32(2)


@T.prim_func(s_tir=True)
def reverse(x: T.Buffer((37,), "float32"), y: T.Buffer((37,), "float32")):
    for i in range(37):
        with T.sblock("reverse"):
            v = T.axis.spatial(37, i)
            y[v] = x[36 - v]


@T.prim_func(s_tir=True)
def guarded(x: T.Buffer((37,), "float32"), y: T.Buffer((37,), "float32")):
    for i in range(37):
        with T.sblock("guarded"):
            v = T.axis.spatial(37, i)
            y[v] = T.if_then_else(v < 5, x[v], T.float32(1))


@T.prim_func(s_tir=True)
def alternating(x: T.Buffer((37,), "float32"), y: T.Buffer((37,), "float32")):
    for i in range(37):
        with T.sblock("alternating"):
            v = T.axis.spatial(37, i)
            y[v] = T.if_then_else(v % 2 < 1, x[v], T.float32(1))


@T.prim_func(s_tir=True)
def window(x: T.Buffer((37,), "float32"), y: T.Buffer((37,), "float32")):
    for i in range(37):
        with T.sblock("window"):
            v = T.axis.spatial(37, i)
            y[v] = T.if_then_else(v >= 3 and v < 30, x[v - 3], T.float32(1))


@T.prim_func(s_tir=True)
def window_with_other_bounds(x: T.Buffer((37,), "float32"), y: T.Buffer((37,), "float32")):
    for i in range(37):
        with T.sblock("window_with_other_bounds"):
            v = T.axis.spatial(37, i)
            y[v] = T.if_then_else(v > 2 and v <= 29, x[v - 3], T.float32(1))


@T.prim_func(s_tir=True)
def predicated(x: T.Buffer((37,), "float32"), y: T.Buffer((37,), "float32")):
    for i in range(40):
        with T.sblock("predicated"):
            v = T.axis.spatial(37, i)
            T.where(i < 37)
            y[v] = x[v]


@T.prim_func(s_tir=True)
def total(x: T.Buffer((37,), "float32"), y: T.Buffer((1,), "float32")):
    for i in range(37):
        with T.sblock("total"):
            v = T.axis.reduce(37, i)
            with T.init():
                y[0] = T.float32(3)
            y[0] = y[0] + x[v]


@T.prim_func(s_tir=True)
def largest(x: T.Buffer((37,), "float32"), y: T.Buffer((1,), "float32")):
    for i in range(37):
        with T.sblock("largest"):
            v = T.axis.reduce(37, i)
            with T.init():
                y[0] = T.float32(0.5)
            y[0] = T.max(y[0], x[v])


@T.prim_func(s_tir=True)
def difference(x: T.Buffer((37,), "float32"), y: T.Buffer((1,), "float32")):
    for i in range(37):
        with T.sblock("difference"):
            v = T.axis.reduce(37, i)
            with T.init():
                y[0] = T.float32(0)
            y[0] = y[0] - x[v]


REFERENCES = {
    scale: lambda x: x * 2,
    reverse: lambda x: x[::-1],
    guarded: lambda x: np.where(np.arange(37) < 5, x, 1),
    alternating: lambda x: np.where(np.arange(37) % 2 < 1, x, 1),
    window: lambda x: np.concatenate([np.ones(3), x[:27], np.ones(7)]),
    window_with_other_bounds: lambda x: np.concatenate([np.ones(3), x[:27], np.ones(7)]),
    predicated: lambda x: x,
    total: lambda x: [3 + x.sum()],
    largest: lambda x: [max(0.5, x.max())],
    difference: lambda x: [-x.sum()],
}


def vectors(func: PrimFunc) -> list[int]:
    """Lanes of the vector loops."""
    found: list[int] = []
    tvm_ffi.structural_walk(
        func.body,
        (For, lambda x: found.append(int(x.extent)) if x.kind == ForKind.VECTORIZED else None),
    )
    return sorted(found)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("func", REFERENCES, ids=lambda f: f.attrs.get("global_symbol"))
def test_same_values(func, lanes, rng):
    x = rng.standard_normal(37).astype("float32")
    want = np.asarray(REFERENCES[func](x.astype("float64")))
    y = tvm.runtime.tensor(np.zeros(want.shape, "float32"))
    mod = tvm.compile(vectorize_leaf_loops(func, lanes), target="llvm")
    mod(tvm.runtime.tensor(x), y)
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-6, atol=1e-6)


def test_contiguous_loops_and_sums_become_vectors():
    assert vectors(vectorize_leaf_loops(scale, 16)) == [16]
    assert vectors(vectorize_leaf_loops(total, 16)) == [2, 4, 8, 16, 16]


@pytest.mark.parametrize("func", [reverse, alternating, predicated])
def test_leaves_alone_what_would_not_be_a_vector(func):
    tvm.ir.assert_structural_equal(vectorize_leaf_loops(func, 16), func)


def test_splits_a_loop_where_its_branch_changes_sides():
    """So that no part has a branch: 5 + 32 iterations, and 3 + 27 + 7."""
    for func in (guarded, window, window_with_other_bounds):
        rewritten = vectorize_leaf_loops(func, 16)
        assert vectors(rewritten) == [16]
        assert "if_then_else" not in rewritten.script()


def test_a_reduction_without_lanes_starts_before_its_loop():
    """An extent of 0 would never reach the init inside."""
    func = vectorize_leaf_loops(difference, 16)
    assert not vectors(func)
    assert type(func.body.block.body).__name__ == "SeqStmt"


def test_extents_below_the_lanes_are_left_alone():
    assert not vectors(vectorize_leaf_loops(scale, 64))


@T.prim_func(s_tir=True)
def row_sums(px: T.handle, py: T.handle):
    n = T.int64()
    x = T.match_buffer(px, (n, T.int64(16)))
    y = T.match_buffer(py, (n, T.int64(16)))
    s = T.sblock_alloc_buffer((n, T.int64(16)))
    for i in T.parallel(n):
        for j in range(T.int64(16)):
            with T.sblock("double"):
                v, w = T.axis.remap("SS", [i, j])
                s[v, w] = x[v, w] * T.float32(2)
        for j in range(T.int64(16)):
            with T.sblock("shift"):
                v, w = T.axis.remap("SS", [i, j])
                y[v, w] = s[v, w] + s[v, T.int64(15) - w]


def test_small_symbolic_work_gets_a_serial_copy_with_its_own_buffers():
    func = run_small_loops_serially(row_sums, 1000)
    assert type(func.body.block.body).__name__ == "IfThenElse"
    assert [b.name for b in func.body.block.alloc_buffers] == ["s", "s_serial"]


@pytest.mark.parametrize("n", [0, 1, 31, 32, 400])
def test_both_copies_compute_the_same(n, rng):
    x = rng.standard_normal((n, 16)).astype("float32")
    y = tvm.runtime.tensor(np.zeros_like(x))
    tvm.compile(run_small_loops_serially(row_sums, 1000), target="llvm")(tvm.runtime.tensor(x), y)
    np.testing.assert_allclose(y.numpy(), 2 * (x + x[:, ::-1]), rtol=1e-6)


def test_constant_work_is_decided_elsewhere():
    tvm.ir.assert_structural_equal(run_small_loops_serially(scale, 1000), scale)
