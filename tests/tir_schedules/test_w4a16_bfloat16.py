"""INT4 weights times bfloat16 activations against float64 sums of the same rounded activations."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import ROWS, TARGETS, target
from test_int4_matmul import PER_CHANNEL, SHAPES, random_parts

from sits_tvm.config import QuantSpec
from tir_schedules import ComputeBfloat16
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import interleave, pack_nibbles
from tir_schedules.matmul.int4_matmul import int4_matmul, int4_take
from tir_schedules.matmul_cpu.rule import Matmul

TARGETS |= {"znver4": "llvm -mcpu=znver4", "icelake": "llvm -mcpu=icelake-server"}
BF16 = ml_dtypes.bfloat16
RUNS_HERE = ("host", "haswell", "generic")
ROUNDED = QuantSpec(group_size=32, symmetric=False, activation="bfloat16")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def compile_kernel(func, name="host", rule=True):
    """``run(*inputs, shape=…, dtype=…)`` of a function that is compiled as in a build."""
    scheduled = Matmul().apply(func, target(name), False).mod if rule else func
    mod = scheduled if rule else tvm.IRModule({"main": func})
    kernel = tvm.compile(ComputeBfloat16()(mod), target=target(name))["main"]

    def run(*arrays, shape, dtype=BF16):
        output = tvm.runtime.tensor(np.full(shape, np.nan, dtype))
        kernel(*(tvm.runtime.tensor(array) for array in arrays), output)
        return output.numpy()

    return run


def check(y, x, weight):
    """`y` is a product of `x`, in bfloat16 by now, rounded once to its own dtype."""
    expected = x.astype("float64") @ weight.T.astype("float64")
    factors = np.abs(x.astype("float64")) @ np.abs(weight.T.astype("float64"))
    step = ml_dtypes.finfo(y.dtype).eps * np.abs(expected)
    assert y.shape == expected.shape
    assert (np.abs(y.astype("float64") - expected) <= 2e-6 * factors + step + 1e-30).all()


@pytest.mark.parametrize("name", RUNS_HERE)
@pytest.mark.parametrize(("n", "k", "spec"), SHAPES)
def test_one_kernel_serves_every_number_of_rows(rng, n, k, spec, name):
    parts, weight = random_parts(rng, n, k, spec)
    run = compile_kernel(int4_matmul(None, n, k, spec, "bfloat16", "vectors"), name)
    for m in ROWS:
        x = rng.standard_normal((m, k)).astype(BF16)
        check(run(x, *parts, shape=(m, n)), x, weight)


@pytest.mark.parametrize("name", RUNS_HERE)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_wider_activations_are_rounded(rng, dtype, name):
    parts, weight = random_parts(rng, 40, 72, ROUNDED)
    run = compile_kernel(int4_matmul(None, 40, 72, ROUNDED, dtype, "vectors"), name)
    for m in (1, 2, 40):
        x = rng.standard_normal((m, 72)).astype(dtype)
        check(run(x, *parts, shape=(m, 40), dtype=dtype), x.astype(BF16), weight)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("name", RUNS_HERE)
def test_every_code_and_zero_point(rows, name):
    """Channel z has zero point z and all 16 codes; one-hot rows read them, exactly."""
    code = (np.arange(64)[None, :] + 3 * np.arange(16)[:, None]) % 16
    zero = np.stack([np.arange(16), 15 - np.arange(16)], 1)
    scale = np.full((16, 2), 2.0**-3, "float32")
    spec = QuantSpec(group_size=32, symmetric=False, scale_dtype="float32")
    parts = [interleave(part, 16) for part in (pack_nibbles(code), scale, pack_nibbles(zero))]
    run = compile_kernel(int4_matmul(rows, 16, 64, spec, "bfloat16", "vectors"), name)
    weight = (code - zero.repeat(32, 1)) / 8
    for start in range(0, 64, rows):
        eye = np.eye(64)[start : start + rows]
        x = np.concatenate([eye, np.zeros((rows - len(eye), 64))]).astype(BF16)
        y = run(x, *parts, shape=(rows, 16))[: len(eye)]
        np.testing.assert_array_equal(y.astype("float64"), weight.T[start : start + rows])


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_what_is_not_finite_is_not_hidden(rng, rows):
    """Denormal activations count as themselves or as zero; infinity and NaN pass."""
    parts, weight = random_parts(rng, 40, 72, ROUNDED)
    x = np.full((rows, 72), 1e-39, BF16)
    run = compile_kernel(int4_matmul(rows, 40, 72, ROUNDED, "bfloat16", "vectors"))
    y = run(x, *parts, shape=(rows, 40))
    assert (np.abs(y.astype("float64")) <= 1.01 * np.abs(x.astype("float64") @ weight.T)).all()
    for bad in (np.inf, -np.inf, np.nan):
        x[:, 5] = bad
        assert not np.isfinite(run(x, *parts, shape=(rows, 40)).astype("float64")).any()


def test_the_instruction_is_there_only_where_the_target_has_it():
    func = int4_matmul(None, 32, 64, ROUNDED, "float32", "vectors")
    for name, has in (("znver4", True), ("icelake", False), ("haswell", False)):
        mod = ComputeBfloat16()(Matmul().apply(func, target(name), False).mod)
        assembly = tvm.compile(mod, target=target(name)).mod.inspect_source("asm")
        assert ("vdpbf16ps" in assembly) == has
        assert ("vpermw" in assembly) == has


@settings(max_examples=10, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group=st.sampled_from([32, 64, 128, -1]),
    symmetric=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(m, n, k, group, symmetric, seed):
    spec = QuantSpec(group_size=group, symmetric=symmetric)
    rng = np.random.default_rng(seed)
    parts, weight = random_parts(rng, n, k, spec)
    run = compile_kernel(int4_matmul(m, n, k, spec, "bfloat16", "vectors"))
    x = rng.standard_normal((m, k)).astype(BF16)
    check(run(x, *parts, shape=(m, n)), x, weight)


@pytest.mark.parametrize("order", ORDERS)
def test_take(rng, order):
    parts, weight = random_parts(rng, 50, 37, PER_CHANNEL, order)
    run = compile_kernel(int4_take(None, 50, 37, PER_CHANNEL, "bfloat16", order), rule=False)
    ids = rng.integers(0, 50, 9)
    np.testing.assert_array_equal(run(ids, *parts, shape=(9, 37)), weight[ids].astype(BF16))
