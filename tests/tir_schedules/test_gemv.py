"""One row: the three loop nests of `gemv`, with tails in both directions, against float64."""

import numpy as np
import pytest
from kernel_runs import assert_close, compile_kernel, schedule
from tvm import te

from sits_tvm.config import QuantSpec
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack
from tir_schedules.matmul.int4_matmul import int4_matmul

SIZES = [(1, 1), (3, 5), (15, 16), (16, 15), (17, 33), (64, 64), (256, 300), (300, 257)]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def product(n, k, dtype, *, rows_of_n):
    """x (1, k) times a weight stored as rows of n (k, n) or rows of k (n, k)."""
    x = te.placeholder((1, k), dtype, name="x")
    w = te.placeholder((k, n) if rows_of_n else (n, k), dtype, name="w")
    r = te.reduce_axis((0, k), name="r")
    y = te.compute(
        (1, n),
        lambda i, j: te.sum(x[i, r] * (w[r, j] if rows_of_n else w[j, r]), axis=r),
        name="y",
    )
    return te.create_prim_func([x, w, y])


@pytest.mark.parametrize("name", ["host", "haswell", "generic"])
@pytest.mark.parametrize("rows_of_n", [True, False])
def test_float(rng, rows_of_n, name):
    for n, k in SIZES:
        dtype = "float16" if n == 17 else "float32"
        run = compile_kernel(product(n, k, dtype, rows_of_n=rows_of_n), name)
        x = rng.standard_normal((1, k)).astype(dtype)
        w = rng.standard_normal((k, n)).astype(dtype)
        stored = w if rows_of_n else np.ascontiguousarray(w.T)
        y = run(x, stored, shape=(1, n), dtype=dtype)
        assert_close(y, x.astype("float64") @ w.astype("float64"), x, w)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, -1])
def test_int4(rng, group_size, symmetric):
    spec = QuantSpec(group_size=group_size, symmetric=symmetric)
    for n, k in SIZES:
        parts = pack(rng.standard_normal((n, k)).astype("float32"), spec, "vectors")
        weight = unpack(parts, PackedLayout(n, k, spec, "vectors"))
        run = compile_kernel(int4_matmul(1, n, k, spec, "float32", "vectors"))
        x = rng.standard_normal((1, k)).astype("float32")
        assert_close(run(x, *parts, shape=(1, n)), x.astype("float64") @ weight.T, x, weight.T)


def test_weights_are_read_straight_from_memory():
    """No copy of the weight: scratch memory has one row, and the results of a tile."""
    text = schedule(product(256, 512, "float32", rows_of_n=False)).script()
    assert "T.alloc_buffer(" not in text
    spec = QuantSpec(group_size=32)
    text = schedule(int4_matmul(1, 256, 512, spec, "float32", "vectors")).script()
    row, results = (f"T.alloc_buffer((T.int64(1), T.int64({width})))" for width in (512, 3 * 16))
    assert text.count("T.alloc_buffer(") == text.count(row) + text.count(results) == 2


def test_sums_of_many_terms_keep_their_precision(rng):
    """2^16 terms of 1 + noise: partial sums side by side, not one long chain."""
    k = 1 << 16
    x = (1 + 1e-3 * rng.standard_normal((1, k))).astype("float32")
    w = np.ones((8, k), "float32")
    y = compile_kernel(product(8, k, "float32", rows_of_n=False))(x, w, shape=(1, 8))
    np.testing.assert_allclose(y, x.astype("float64") @ w.T, rtol=2e-6)
