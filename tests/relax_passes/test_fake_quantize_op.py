"""R.sits.fake_quantize as a Relax op: types, errors, script, and what TVM's passes do to it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from quantize_reference import Grid, quantized
from quantize_runs import TARGET, module, run, variables
from tvm import relax
from tvm.ir import assert_structural_equal

from relax_passes.op import fake_quantize, quantize
from relax_passes.op._fake_quantize_gradient import fake_quantize_grad, fake_quantize_tangent
from sits_tvm import SitsError, build


def array(values, dtype="float32"):
    return np.asarray(values, dtype)


def tensor(shape, dtype="float32", name="x"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def infer(call):
    return relax.BlockBuilder().normalize(call).ty


@pytest.mark.parametrize("axis", [0, -1, 1])
@pytest.mark.parametrize("symbolic", [False, True])
def test_type_is_that_of_x(axis, symbolic):
    n = tvm.tirx.Var("n", "int64") if symbolic else 6
    x = tensor([n, 8], "float16")
    assert_structural_equal(infer(fake_quantize(x, tensor([]))), x.ty)
    assert_structural_equal(infer(fake_quantize(x, tensor([[n, 8][axis]]), axis=axis)), x.ty)
    groups = [(n + 3) // 4, 8] if axis == 0 else [n, 2]
    assert_structural_equal(infer(fake_quantize(x, tensor(groups), axis=axis, group_size=4)), x.ty)
    assert str(infer(quantize(x, tensor([]))).dtype) == "int8"
    assert str(infer(quantize(x, tensor([]), signed=False)).dtype) == "uint8"


def test_unknown_shapes_keep_their_rank():
    x = relax.Var("x", relax.TensorType(dtype="float32", ndim=2))
    assert infer(fake_quantize(x, tensor([4, 2]), group_size=4)).ndim == 2


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"bits": 1}, "bits=1: write a width of 2 to 8"),
        ({"bits": 4.0}, "bits=4.0"),
        ({"group_size": 0}, "group_size=0: write a number of elements"),
        ({"group_size": -2}, "group_size=-2"),
        ({"signed": 1}, "signed=1 is not True or False"),
        ({"axis": None}, "axis=None is not an integer"),
        ({"clip_mask": "hard"}, "clip_mask='hard' is not 'rounded' or 'strict'"),
        ({"scale_dtype": "int8"}, "scale_dtype='int8'"),
    ],
)
def test_wrong_attributes(attributes, message):
    with pytest.raises(SitsError, match="fake_quantize") as caught:
        fake_quantize(tensor([4, 8]), tensor([]), **attributes)
    assert message in str(caught.value)


def test_all_wrong_attributes_are_listed():
    with pytest.raises(SitsError) as caught:
        fake_quantize(tensor([4, 8]), tensor([]), bits=9, group_size=0, clip_mask="")
    assert len(caught.value.diagnostics) == 3


X = tensor([4, 8])
CONST = relax.const


@pytest.mark.parametrize(
    ("args", "form", "message"),
    [
        ((tensor([4, 8], "int32"), tensor([])), {}, "x is R.Tensor((4, 8), dtype=\"int32\")"),
        ((X, tensor([], "int8")), {}, "scale is R.Tensor"),
        ((X, tensor([]), tensor([], "bool")), {}, "zero_point is R.Tensor"),
        ((X, tensor([7])), {}, "scale (7,) is not (8,), which x (4, 8) with axis=-1 needs"),
        ((X, tensor([1])), {}, "scale (1,) is not (8,)"),
        ((X, tensor([4, 2])), {}, "scale (4, 2) has rank 2; without group_size"),
        ((X, tensor([4, 3])), {"group_size": 4}, "scale (4, 3) is not (4, 2)"),
        ((X, tensor([4, 2])), {"group_size": 3}, "scale (4, 2) is not (4, 3)"),
        ((X, tensor([2])), {"group_size": 4}, "scale has the rank of x"),
        ((X, tensor([])), {"group_size": 4}, "scale has the rank of x"),
        ((X, tensor([8])), {"axis": 2}, "axis=2 is out of range for x (4, 8)"),
        ((X, tensor([8]), tensor([])), {}, "zero_point () does not have the shape of scale (8,)"),
        ((tensor([]), tensor([1])), {}, "x has rank 0, so scale must have rank 0"),
        ((X, CONST(0.0)), {}, "scales must be positive and finite, found 0.0"),
        ((X, CONST(-0.5)), {}, "found -0.5"),
        ((X, CONST(float("nan"))), {}, "found nan"),
        ((X, CONST(array([1, 0, 2, 3, -1, 1, 1, 1]))), {}, "found 0.0, -1.0 (2 of 8)"),
        ((X, CONST(1e-9)), {"scale_dtype": "float16"}, "positive and finite in float16"),
        ((X, CONST(1.0), CONST(9, "int8")), {}, "zero points must be codes -8…7, found 9"),
        ((X, CONST(1.0), CONST(-1, "int8")), {"signed": False}, "codes 0…15, found -1"),
        ((X, CONST(1.0), CONST(-8, "int8")), {"narrow_range": True}, "codes -7…7, found -8"),
        ((X, CONST(1.0), CONST(float("nan"))), {}, "found nan"),
    ],
)  # fmt: skip
def test_wrong_arguments(args, form, message):
    with pytest.raises(ValueError, match="fake_quantize:") as caught:
        infer(fake_quantize(*args, **form))
    assert message in str(caught.value)


def test_all_wrong_arguments_are_listed():
    with pytest.raises(ValueError, match="fake_quantize:") as caught:
        infer(fake_quantize(X, CONST(0.0), CONST(99, "int32")))
    assert "found 0.0" in str(caught.value)
    assert "found 99" in str(caught.value)


def test_constant_behind_a_variable_is_checked():
    bb = relax.BlockBuilder()
    with bb.function("main", [X]):
        with bb.dataflow():
            scale = bb.emit(CONST(0.0))
            with pytest.raises(ValueError, match="found 0"):
                bb.emit(fake_quantize(X, scale))
            out = bb.emit_output(X)
        bb.emit_func_output(out)


def test_parsed_attributes_are_validated():
    call = fake_quantize(X, tensor([]))
    wrong = relax.Call(call.op, call.args, {**dict(call.attrs.items()), "bits": 17})
    with pytest.raises(ValueError, match="bits=17"):
        relax.analysis.well_formed(
            module(lambda *a: relax.Call(wrong.op, a, wrong.attrs), list(call.args))
        )


def everything(x, scale, zero_point, gy):
    form = {"group_size": 4, "scale_dtype": "float16"}
    attrs = dict(fake_quantize(x, scale, zero_point, **form).attrs.items())
    codes = quantize(x, scale, zero_point, **form)
    return relax.Tuple([
        fake_quantize(x, scale, zero_point, **form),
        codes,
        fake_quantize_grad(gy, x, scale, zero_point, **attrs),
        fake_quantize_tangent(gy, scale, zero_point, x, scale, zero_point, **attrs),
    ])  # fmt: skip


def everything_module():
    x, scale = tensor([4, 8]), tensor([4, 2], name="scale")
    return module(
        everything, [x, scale, tensor([4, 2], name="zero_point"), tensor([4, 8], name="gy")]
    )


def test_script_and_json_round_trip():
    mod = everything_module()
    assert_structural_equal(tvm.script.from_source(mod.script()), mod)
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)


def test_common_subexpressions_merge_only_when_attributes_agree():
    def twice(x, scale):
        bits = (4, 4, 3)
        return relax.Tuple([fake_quantize(x, scale, bits=b) for b in bits])

    mod = relax.transform.EliminateCommonSubexpr()(module(twice, [X, tensor([], name="s")]))
    assert mod.script().count("R.sits.fake_quantize") == 2


def test_mixed_precision_quantizes_in_float32(rng):
    """The codes must not come from a weight rounded to float16."""
    x, w = rng.standard_normal((4, 32), "float32"), rng.standard_normal((8, 32), "float32")
    scale = np.abs(w).max(1) / 7
    call = lambda x, w, s: relax.op.matmul(  # noqa: E731
        x, relax.op.permute_dims(fake_quantize(w, s, axis=0))
    )
    mod = relax.transform.ToMixedPrecision()(module(call, variables(x, w, scale)))
    assert "R.sits.fake_quantize(w" not in mod.script()
    value = quantized(w, scale, grid=Grid(axis=0)).value
    expected = x.astype("float16").astype("float64") @ value.astype("float16").T
    np.testing.assert_allclose(run(build(mod, TARGET), x, w, scale), expected, rtol=5e-3, atol=5e-3)
