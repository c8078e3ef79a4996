"""bfloat16 models with INT4 weights, and bfloat16 activations of others, against float64."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from small_builds import CPU, G32, codes, refused
from small_modules import one_function, restored
from test_build_int8_activations import gated, random_params
from tvm import relax, tirx

import sits_tvm
from sits_tvm import Config, QuantSpec

BF16 = ml_dtypes.bfloat16
ROUNDED = QuantSpec(group_size=32, symmetric=False, activation="bfloat16")


def reference(x, params):
    """In float64, from the restored INT4 weights and `x` rounded to bfloat16."""
    params = {name: value.astype("float32") for name, value in params.items()}
    w1, w2 = (restored(params[name].T, G32).T.astype("float64") for name in ("a1", "a2"))
    rounded = x.astype(BF16).astype("float64")
    gate = rounded @ w1 + params["a3"]
    return gate / (1 + np.exp(-gate)) * (rounded @ w2) + x.astype("float64")


@pytest.mark.parametrize(
    ("dtype", "spec", "tolerance"),
    [
        ("bfloat16", G32, 2.0**-6),
        pytest.param("float32", ROUNDED, 2e-6, marks=pytest.mark.slow),
        ("float16", ROUNDED, 2e-3),
    ],
)
def test_values_for_every_number_of_rows(rng, dtype, spec, tolerance):
    params = random_params(rng, dtype)
    built = sits_tvm.build(gated(dtype=dtype), CPU, params=params, config=Config(quant=spec))
    assert len(built.report.quantized) == 2
    assert not built.report.skipped
    vm = relax.VirtualMachine(built, tvm.cpu())
    for shape in ((1, 1), (2, 3), (1, 40), (0, 4)):
        x = rng.standard_normal((*shape, 64)).astype(dtype)
        got = vm["main"](tvm.runtime.tensor(x), *built.param_list).numpy()
        assert str(got.dtype) == dtype
        want = reference(x, params)
        limit = tolerance * np.abs(want).max(initial=1)
        assert np.abs(got.astype("float64") - want).max(initial=0) <= limit


@pytest.mark.slow
def test_weights_may_come_later(rng):
    """``main_transform_params`` packs bfloat16 weights as the build does."""
    params = random_params(rng, "bfloat16")
    config = Config(quant=QuantSpec(group_size=32))
    built = sits_tvm.build(gated(dtype="bfloat16"), CPU, params=params, config=config)
    later = sits_tvm.build(gated(dtype="bfloat16"), CPU, config=config)
    vm = relax.VirtualMachine(later, tvm.cpu())
    packed = vm["main_transform_params"]([tvm.runtime.tensor(params[n]) for n in sorted(params)])
    for got, want in zip(packed, built.param_list, strict=True):
        np.testing.assert_array_equal(got.numpy().astype("float64"), want.numpy().astype("float64"))


def test_a_bfloat16_table(rng):
    table, tokens = relax.TensorType((96, 64), "bfloat16"), tirx.Var("t", "int64")
    mod = one_function(
        lambda bb, ids, w: relax.op.take(w, ids, axis=0),
        relax.TensorType((tokens,), "int64"),
        table,
        num_input=1,
    )
    config = Config(quant=G32, quantize_embedding=True)
    weight = rng.standard_normal((96, 64)).astype(BF16)
    built = sits_tvm.build(mod, CPU, params={"a1": weight}, config=config)
    ids = rng.integers(0, 96, 5)
    vm = relax.VirtualMachine(built, tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(ids), *built.param_list).numpy()
    want = restored(weight.astype("float32"), G32)[ids].astype(BF16)
    np.testing.assert_array_equal(got.astype("float32"), want.astype("float32"))


def test_the_report_says_it():
    report = sits_tvm.lower(gated(), CPU, config=Config(quant=ROUNDED))[1]
    specs = {str(row.spec) for row in report.quantized}
    assert len(specs) == 1
    assert "bfloat16 activations" in specs.pop()


def test_cuda_takes_bfloat16_models_and_refuses_to_round_others():
    cuda = "cuda -arch=sm_90"
    found = refused(gated(), cuda, config=Config(quant=ROUNDED))
    assert codes(found) == ["activation-target"]
    report = sits_tvm.lower(gated(dtype="bfloat16"), cuda, config=Config(quant=G32))[1]
    assert len(report.quantized) == 2
