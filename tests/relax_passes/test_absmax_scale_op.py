"""R.sits.absmax_scale against the NumPy format, bit for bit, and against float64."""

import itertools

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes.op import absmax_scale, fake_quantize
from sits_tvm import QuantSpec
from tir_schedules.int4_format.rounding import quantize

SPECS = [
    QuantSpec(bits=b, group_size=g, symmetric=s, scale_dtype=d)
    for b, g, s, d in itertools.product((2, 4), (32, -1), (True, False), ("float16", "float32"))
]


def module(x_type, **attrs):
    bb = relax.BlockBuilder()
    x = relax.Var("x", x_type)
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(absmax_scale(x, **attrs))
        bb.emit_func_output(out)
    return bb.get()


def run(mod, *arrays):
    out = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](*arrays)
    return [out.numpy()] if isinstance(out, tvm.runtime.Tensor) else [o.numpy() for o in out]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis", [-1, 0])
def test_same_bits_as_packing(rng, spec, axis):
    weight = (rng.standard_normal((6, 72)) * 0.02).astype("float32")
    weight[1], weight[2], weight[3] = 0, weight[2] * 1e-7, np.abs(weight[3])
    x = weight if axis == -1 else np.ascontiguousarray(weight.T)
    mod = module(
        relax.TensorType(x.shape, "float32"),
        bits=spec.bits,
        axis=axis,
        group_size=spec.group_size,
        symmetric=spec.symmetric,
        scale_dtype=spec.scale_dtype,
    )
    _, scale, zero = quantize(weight, spec)
    for got, want in itertools.zip_longest(run(mod, x), [scale] if zero is None else [scale, zero]):
        np.testing.assert_array_equal(got if axis == -1 else got.T, want)


def test_per_token_int8_with_symbolic_rows(rng):
    n = tvm.tirx.Var("n", "int64")
    mod = module(relax.TensorType((2, n, 24), "float16"), bits=8)
    x = rng.standard_normal((2, 5, 24)).astype("float16")
    (scale,) = run(mod, x)
    np.testing.assert_array_equal(
        scale, np.abs(x.astype("float32")).max(-1, keepdims=True) / np.float32(127)
    )
    assert run(mod, x[:, :0])[0].shape == (2, 0, 1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_it_is_a_constant_to_gradients(symmetric):
    """x gets the gradient of fake_quantize alone, with nothing through the scale."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            made = bb.emit(absmax_scale(x, symmetric=symmetric))
            scale, *zero = (
                [made] if symmetric else [bb.emit(relax.TupleGetItem(made, i)) for i in (0, 1)]
            )
            y = bb.emit(fake_quantize(x, scale, *zero, group_size=-1, signed=symmetric))
            out = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(out)
    mod = relax.transform.Gradient("main")(bb.get())
    ex = tvm.compile(mod, "llvm")
    values = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
    _, (gradient,) = relax.VirtualMachine(ex, tvm.cpu())["main_adjoint"](values)
    np.testing.assert_array_equal(gradient.numpy(), np.ones_like(values))  # absmax clips nothing


def test_prints_parses_and_survives_json():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4, 8), "float32")):
            with R.dataflow():
                s = R.sits.absmax_scale(
                    x, bits=4, axis=-1, group_size=-1, symmetric=True, scale_dtype="float16"
                )
                R.output(s)
            return s

    assert_structural_equal(tvm.script.from_source(Module.script()), Module)
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(Module)), Module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "bits=9: write a width of 2 to 8"),
        ({"axis": 2}, "axis=2 does not exist in x"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": None}, "group_size=None: write -1"),
        ({"symmetric": 1}, "symmetric=1 is not True or False"),
        ({"scale_dtype": "bfloat16"}, "scale_dtype='bfloat16' is not"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        module(relax.TensorType((4, 8), "float32"), **options)
    with pytest.raises(ValueError, match=r"x is .*int32"):
        module(relax.TensorType((4, 8), "int32"))
