"""`Matmul` on what Relax makes of matrix products: right for every shape, and really scheduled."""

import math
import re

import numpy as np
import pytest
import tvm
from kernel_runs import (
    ROWS,
    assert_close,
    compile_kernel,
    compile_relax,
    kernels,
    lower_relax,
    schedule,
    target,
)
from tvm import relax, te, tirx
from tvm.relax import op

from tir_schedules.matmul_cpu.rule import Matmul

ERF = np.vectorize(math.erf)


def module(build, *shapes, dtype="float32"):
    """A Relax module whose main returns ``build(*arguments)``; strings in shapes are symbolic."""
    symbols = {}
    builder = relax.BlockBuilder()
    arguments = []
    for i, shape in enumerate(shapes):
        extents = [
            symbols.setdefault(e, tirx.Var(e, "int64")) if isinstance(e, str) else e for e in shape
        ]
        arguments.append(relax.Var(f"a{i}", relax.TensorType(extents, dtype)))
    with builder.function("main", arguments):
        with builder.dataflow():
            result = builder.emit_output(build(*arguments))
        builder.emit_func_output(result)
    return builder.get()


def linear(x, w):
    return op.matmul(x, op.permute_dims(w))


def randoms(rng, *shapes, dtype="float32"):
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("n", "k"), [(40, 72), (17, 33), (1, 5), (256, 640)])
def test_linear_serves_every_number_of_rows(rng, n, k, dtype):
    run = compile_relax(module(linear, ("m", k), (n, k), dtype=dtype))
    for m in ROWS:
        x, w = randoms(rng, (m, k), (n, k), dtype=dtype)
        if m == 0:
            x = np.zeros((0, k), dtype)
        assert_close(run(x, w), x.astype("float64") @ w.astype("float64").T, x, w.T)


@pytest.mark.parametrize("name", ["haswell", "generic"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_cpus(rng, name, dtype):
    run = compile_relax(module(linear, ("m", 72), (40, 72), dtype=dtype), name)
    for m in ROWS[1:]:
        x, w = randoms(rng, (m, 72), (40, 72), dtype=dtype)
        assert_close(run(x, w), x.astype("float64") @ w.astype("float64").T, x, w.T)


PRODUCTS = {
    "weight (k, n)": (("m", 72), (72, 40)),
    "narrow (k, n)": (("m", 33), (33, 7)),
    "wide (k, n)": (("m", 24), (24, 1100)),
    "batched": ((2, 3, "m", 24), (2, 3, 24, 37)),
    "all symbolic": (("b", "h", "m", "k"), ("b", "h", "k", "n")),
    "weight under a batch": (("b", "m", 24), (24, 37)),
    "one matrix for all": (("b", "h", "m", 24), (1, 1, 24, 37)),
    "heads share": (("b", 4, "m", 24), ("b", 1, 24, 37)),
    "left shared": ((1, "m", 24), ("b", 24, 37)),
    "static rows": ((2, 7, 24), (24, 37)),
    "one static row": ((1, 1, 24), (24, 37)),
}


@pytest.mark.parametrize("shapes", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products(rng, shapes, dtype):
    run = compile_relax(module(op.matmul, *shapes, dtype=dtype))
    for sizes in ({"m": 1}, {"m": 2, "b": 1, "n": 1}, {"m": 13, "k": 1}, {"m": 29, "n": 130}):
        sizes = {"b": 2, "h": 3, "k": 19, "n": 41} | sizes
        x, w = randoms(rng, *([sizes.get(e, e) for e in shape] for shape in shapes), dtype=dtype)
        assert_close(run(x, w), x.astype("float64") @ w.astype("float64"), x, w)


def test_transposed_keys_of_attention(rng):
    run = compile_relax(
        module(
            lambda q, k: op.matmul(q, op.permute_dims(k, [0, 1, 3, 2])),
            ("b", 4, "m", 24),
            ("b", 4, "n", 24),
        )
    )
    for m, n in ((1, 1), (1, 77), (7, 77), (64, 64)):
        q, k = randoms(rng, (2, 4, m, 24), (2, 4, n, 24))
        kt = k.swapaxes(-1, -2)
        assert_close(run(q, k), q.astype("float64") @ kt.astype("float64"), q, kt)


@pytest.mark.parametrize("shapes", [((24,), (24, 37)), (("m", 24), (24,))])
def test_matrix_and_vector(rng, shapes):
    run = compile_relax(module(op.matmul, *shapes))
    x, w = randoms(rng, *([29 if e == "m" else e for e in shape] for shape in shapes))
    assert_close(run(x, w), x.astype("float64") @ w.astype("float64"), x, w)


EPILOGUES = {
    "bias": (lambda y, b, r: op.add(y, b), lambda y, b, r: y + b),
    "residual": (lambda y, b, r: op.add(r, op.add(y, b)), lambda y, b, r: r + (y + b)),
    "gelu": (
        lambda y, b, r: op.nn.gelu(op.add(y, b)),
        lambda y, b, r: (y + b) * 0.5 * (1 + ERF((y + b) / 2**0.5)),
    ),
    "gelu_tanh": (
        lambda y, b, r: op.nn.gelu_tanh(y),
        lambda y, b, r: 0.5 * y * (1 + np.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y**3))),
    ),
    "silu times": (
        lambda y, b, r: op.multiply(op.nn.silu(y), r),
        lambda y, b, r: y / (1 + np.exp(-y)) * r,
    ),
    "cast": (lambda y, b, r: op.astype(y, "float16"), lambda y, b, r: y.astype("float16")),
    "independent of the product": (
        lambda y, b, r: op.where(op.greater(r, relax.const(0.0)), y, relax.const(-1e9)),
        lambda y, b, r: np.where(r > 0, y, -1e9),
    ),
}


@pytest.mark.parametrize(("relax_form", "reference"), EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("n", [32, 37])
def test_epilogue_joins_the_kernel(rng, relax_form, reference, n):
    def build(x, w, b, r):
        return relax_form(linear(x, w), b, r)

    run = compile_relax(module(build, ("b", "m", 24), (n, 24), (n,), ("b", "m", n)))
    for m in (1, 2, 17):
        x, w, b, r = randoms(rng, (1, m, 24), (n, 24), (n,), (1, m, n))
        expected = reference(x.astype("float64") @ w.astype("float64").T, b, r)
        np.testing.assert_allclose(
            run(x, w, b, r),
            expected,
            rtol=2e-3 if "float16" in str(expected.dtype) else 2e-5,
            atol=2e-5,
        )


@pytest.mark.parametrize("rows", [1, 19])
def test_prologue_joins_the_kernel(rng, rows):
    """Elementwise producers of either operand, as a hand-written PrimFunc may have them."""
    x = te.placeholder((rows, 24), name="x")
    w = te.placeholder((20, 24), "float16", name="w")
    doubled = te.compute(x.shape, lambda i, j: x[i, j] * 2.0, name="doubled")
    shifted = te.compute(w.shape, lambda i, j: w[i, j].astype("float32") + 1.0, name="shifted")
    r = te.reduce_axis((0, 24))
    y = te.compute((rows, 20), lambda i, j: te.sum(doubled[i, r] * shifted[j, r], axis=r))
    run = compile_kernel(te.create_prim_func([x, w, y]))
    a, b = randoms(rng, (rows, 24), (20, 24), dtype="float16")
    a32, b1 = a.astype("float32"), b.astype("float64") + 1
    assert_close(run(a32, b, shape=(rows, 20)), 2 * a32.astype("float64") @ b1.T, 2 * a32, b1.T)


def test_half_precision_is_summed_in_float32(rng):
    """4096 ones: a float16 sum stops at 2048."""
    for m in (1, 3):
        run = compile_relax(module(linear, ("m", 4096), (16, 4096), dtype="float16"))
        x, w = np.ones((m, 4096), "float16"), np.ones((16, 4096), "float16")
        assert (run(x, w) == 4096).all()


def test_half_precision_with_symbolic_batch_and_rows(rng):
    """The copy of lhs in float32 is not flat: TVM divides by its row count and fails."""

    run = compile_relax(
        module(
            lambda x, k: op.matmul(x, op.permute_dims(k, [0, 2, 1]), out_dtype="float32"),
            ("b", "m", 8),
            ("b", "n", 8),
            dtype="float16",
        )
    )
    for m, n in ((1, 1), (5, 3), (14, 20)):
        x, k = randoms(rng, (3, m, 8), (3, n, 8), dtype="float16")
        wide, keys = x.astype("float64"), k.swapaxes(1, 2).astype("float64")
        assert_close(run(x, k), wide @ keys, wide, keys)


def test_no_whole_copy_of_a_weight():
    """Scratch memory is a panel of the weight, whatever its size."""
    func = _matmul(1024, 4096)
    sizes = [np.prod([int(e) for e in shape]) for shape in _static_allocations(schedule(func))]
    assert max(sizes) * 4 <= 1 << 20


def test_runs_in_parallel_and_in_vectors():
    text = schedule(_matmul(64, 64)).script()
    assert text.count("T.parallel(") == 2  # one row, many rows
    assert "T.vectorized(T.int64(16))" in text


@pytest.mark.parametrize(("name", "absent"), [("haswell", "zmm"), ("generic", "[yz]mm")])
def test_uses_no_register_the_target_lacks(name, absent):
    with target(name):
        assembly = tvm.compile(schedule(_matmul(64, 64), name), target=target(name))
    text = assembly.mod.inspect_source("asm")
    assert "xmm" in text
    assert not re.search(f"%{absent}", text)


def _matmul(n, k, dtype="float32", *, out=None):
    n, k = (tirx.IntImm("int64", e) for e in (n, k))
    x = te.placeholder((te.var("m", "int64"), k), dtype, name="x")
    w = te.placeholder((n, k), dtype, name="w")
    r = te.reduce_axis((0, k), name="r")
    y = te.compute((x.shape[0], n), lambda i, j: te.sum(x[i, r] * w[j, r], axis=r), name="y")
    return te.create_prim_func([x, w, *([y] if out is None else [out(y)])])


def _static_allocations(func):
    shapes = re.findall(r"alloc_buffer\(\(([^=\n]*?),?\)[,)]", func.script())
    assert shapes
    return [re.findall(r"T\.int64\((\d+)\)", shape) for shape in shapes]


def test_leaves_other_functions_alone():
    """Integers, doubles, a softmax, a sum of squares, an epilogue that is not elementwise."""

    def decline(func):
        return Matmul().apply(func, target(), False) is None

    assert decline(_matmul(16, 16, "int32"))
    assert decline(_matmul(16, 16, "float64"))
    assert not decline(_matmul(16, 16, out=lambda y: te.compute(y.shape, lambda i, j: -y[i, j])))
    assert decline(_matmul(16, 16, out=lambda y: te.compute(y.shape, lambda i, j: y[i, 15 - j])))

    def sliced(y):
        return te.compute((y.shape[0], tirx.IntImm("int64", 8)), lambda i, j: -y[i, j])

    assert decline(_matmul(16, 16, out=sliced))
    x = te.placeholder((8, 8), name="x")
    r = te.reduce_axis((0, 8))
    assert decline(te.create_prim_func([x, te.compute((8,), lambda i: te.sum(x[i, r], axis=r))]))
    square = te.compute((8,), lambda i: te.sum(x[i, r] * x[i, r], axis=r))
    assert decline(te.create_prim_func([x, square]))
    lowered = lower_relax(module(op.nn.softmax, ("m", 8)))
    assert not any(kernels(lowered).values())


def test_leaves_other_targets_alone():
    cuda = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    assert Matmul().apply(_matmul(16, 16), cuda, False) is None


def test_int32_indices(rng):
    """A hand-written PrimFunc may use int32 extents."""
    x = te.placeholder((6, 24), name="x")
    w = te.placeholder((20, 24), name="w")
    r = te.reduce_axis((0, 24))
    y = te.compute((6, 20), lambda i, j: te.sum(x[i, r] * w[j, r], axis=r))
    run = compile_kernel(te.create_prim_func([x, w, y]))
    a, b = randoms(rng, (6, 24), (20, 24))
    assert_close(run(a, b, shape=(6, 20)), a.astype("float64") @ b.astype("float64").T, a, b.T)
