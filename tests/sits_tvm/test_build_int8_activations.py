"""W4A8 and W4A4 builds: values, shared quantization, fused epilogues, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from small_builds import CPU, G32, codes, refused
from small_modules import one_function, restored
from test_stacked_weights import imported
from tvm import relax, tirx

import sits_tvm
from sits_tvm import Config, QuantSpec

W4A8 = Config(quant=QuantSpec(group_size=32, symmetric=False, activation="int8"))
W4A4 = Config(quant=replace(W4A8.quant, activation="int4"))
SHIFTS = [Config(quant=replace(c.quant, activation_scale="power-of-two")) for c in (W4A8, W4A4)]
CUDA = [f"cuda -arch={arch}" for arch in ("sm_80", "sm_90", "sm_90a")]
MATRIX = relax.TensorType((64, 64), "float32")


def gated(axes=("b", "s"), dtype="float32"):
    """silu(x W1 + bias) * (x W2) + x, with symbolic rows."""
    rows = [tirx.Var(name, "int64") for name in axes]
    matrix, vector = relax.TensorType((64, 64), dtype), relax.TensorType((64,), dtype)

    def make(bb, x, w1, w2, bias):
        gate = bb.emit(relax.op.add(bb.emit(relax.op.matmul(x, w1)), bias))
        up = bb.emit(relax.op.matmul(x, w2))
        product = bb.emit(relax.op.multiply(bb.emit(relax.op.nn.silu(gate)), up))
        return relax.op.add(product, x)

    x = relax.TensorType((*rows, 64), dtype)
    return one_function(make, x, matrix, matrix, vector, num_input=1)


def reference(x, params, spec):
    """In float64, from codes of x, one scale a row, and the restored INT4 weights."""
    x = x.astype("float32")
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(2.0**-100))
    scale = scale / np.float32(7 if spec.activation == "int4" else 127)
    if spec.activation_scale == "power-of-two":
        scale = np.exp2(np.ceil(np.log2(scale.astype("float64")))).astype("float32")
    rounded = np.rint(x / scale) * scale.astype("float64")
    w1, w2 = (restored(params[name].T, G32).T.astype("float64") for name in ("a1", "a2"))
    gate = rounded @ w1 + params["a3"]
    return gate / (1 + np.exp(-gate)) * (rounded @ w2) + x


def random_params(rng, dtype="float32"):
    shapes = {"a1": (64, 64), "a2": (64, 64), "a3": (64,)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *((config, "float32") for config in (W4A8, *SHIFTS)),
        *((config, "float16") for config in (W4A8, W4A4)),
    ],
)
def test_values_for_every_number_of_rows(rng, config, dtype):
    """A CPU computes W4A4 by the kernels of W4A8, from codes -7…7."""
    params = random_params(rng, dtype)
    built = sits_tvm.build(gated(dtype=dtype), CPU, params=params, config=config)
    vm = relax.VirtualMachine(built, tvm.cpu())
    for shape in ((1, 1), (2, 3), (1, 40), (0, 4)):
        x = rng.standard_normal((*shape, 64)).astype(dtype)
        got = vm["main"](tvm.runtime.tensor(x), *built.param_list).numpy()
        want = reference(x, {n: v.astype("float64") for n, v in params.items()}, config.quant)
        tolerance = {"float32": 2e-6, "float16": 2e-3}[dtype] * np.abs(want).max(initial=1)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("config", [W4A8, Config(quant=G32)], ids=["int8", "float"])
def test_no_rows_at_all(rng, config):
    """Known when it is built, where constants divide."""

    def make(bb, x, w):
        return relax.op.matmul(x, w)

    mod = one_function(make, relax.TensorType((2, 0, 64), "float32"), MATRIX, num_input=1)
    weights = {"a1": rng.standard_normal((64, 64)).astype("float32")}
    built = sits_tvm.build(mod, CPU, params=weights, config=config)
    x = tvm.runtime.tensor(np.zeros((2, 0, 64), "float32"))
    assert relax.VirtualMachine(built, tvm.cpu())["main"](x, *built.param_list).shape == (2, 0, 64)


def kernel_names(report):
    return sorted(kernel.name.rstrip("0123456789") for kernel in report.kernels)


@pytest.mark.parametrize(
    ("target", "config", "dtype"),
    [
        *((t, W4A8, dtype) for t in (CPU, *CUDA) for dtype in ("float32", "float16", "bfloat16")),
        *((t, W4A4, "float16") for t in (CPU, *CUDA)),
    ],
)
def test_one_quantization_for_two_projections_and_no_kernel_between(rng, target, config, dtype):
    params = random_params(rng, dtype)
    lowered, report = sits_tvm.lower(gated(dtype=dtype), target, params=params, config=config)
    assert lowered.script().count("call_tir(cls.quantize_activation") == 1
    product = "int4_int4_matmul" if config is W4A4 else "int8_matmul"
    assert kernel_names(report) == [
        f"fused_{product}_add_silu",
        f"fused_{product}_multiply_add",
        "quantize_activation",
    ]
    assert {kernel.ranked for kernel in report.kernels} == {"default"}
    if target != CPU:
        rules = ["QuantizeActivationCuda", "TensorCoreMatmul", "TensorCoreMatmul"]
        assert sorted(kernel.family for kernel in report.kernels) == rules
    activations = f"{config.quant.activation} activations"
    assert {activations in str(row.spec) for row in report.quantized} == {True}


def test_queries_keys_and_values_share_a_quantization_on_cuda(rng):
    """Theirs and the one before the output projection; nothing is stacked."""
    _, mod, params = imported()
    lowered, report = sits_tvm.lower(mod, CUDA[1], params=params, config=W4A8)
    assert not report.stacked
    assert lowered.script().count("call_tir(cls.quantize_activation") == 2
    products = [kernel for kernel in report.kernels if "int8_matmul" in kernel.name]
    assert {kernel.family for kernel in products} == {"TensorCoreMatmul"}
    assert "fallback" not in {kernel.ranked for kernel in report.kernels}


@pytest.mark.parametrize("config", [W4A8, W4A4])
def test_older_gpus_are_refused(config):
    found = refused(gated(), "cuda -arch=sm_75", config=config)
    assert codes(found) == ["activation-target"]
    assert "sm_75" in found[0].message
    assert "sm_80" in found[0].message
