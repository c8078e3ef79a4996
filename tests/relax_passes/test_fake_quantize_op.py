"""R.sits.fake_quantize as a Relax op: types, errors, script, fusion, gradients of every order."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import tvm
from quantize_reference import Grid, away_from_ties, gradients, quantized
from quantize_runs import TARGET, evaluate, module, run, variables
from tvm import relax
from tvm.ir import assert_structural_equal

from relax_passes.op import dequantize, fake_quantize, quantize
from relax_passes.op._fake_quantize_gradient import fake_quantize_grad, fake_quantize_tangent
from sits_tvm import SitsError, build

NAN, INF = float("nan"), float("inf")


def array(values, dtype="float32"):
    return np.asarray(values, dtype)


def tensor(shape, dtype="float32", name="x"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def infer(call):
    return relax.BlockBuilder().normalize(call).ty


def differentiated(call, args):
    """(value, partials of sum(value · gy)), gy the last argument; by TVM's Gradient."""

    def loss(*inputs):
        return relax.op.sum(relax.op.multiply(call(*inputs[:-1]), inputs[-1]))

    floats = [arg for arg in args[:-1] if "float" in str(arg.ty.dtype)]
    return relax.transform.Gradient("main", floats)(module(loss, args))


def partials(call, gy, *arrays):
    mod = differentiated(call, variables(*arrays, gy))
    return run(build(mod, TARGET), *arrays, gy, function="main_adjoint")[1]


A = [-4.3, -4.0, -0.3, 0.6, 3.4, 3.5, 3.9, 10]
B = [-2, -1.4, 0.2, 1.1, 5.9, 6.1, 6.4, 9]
UNSIGNED = {"signed": False}
NARROW = {"narrow_range": True}
# name: x, scale, zero point, attributes, gy; right: y, dx, ds, dz
CASES = {
    "symmetric": (
        (A, 0.5, 0, {}, 1),
        ([-4, -4, -0.5, 0.5, 3.5, 3.5, 3.5, 3.5], [0, 1, 1, 1, 1, 1, 0, 0], 5.6, -1.5),
    ),
    "asymmetric": (
        (B, 0.5, 3, UNSIGNED, 1),
        ([-1.5, -1.5, 0, 1, 6, 6, 6, 6], [0, 1, 1, 1, 1, 1, 0, 0], 20.2, -1.5),
    ),
    "not finite": (([INF, -INF, NAN, 1], 1, 0, {}, 1), ([7, -8, NAN, 1], [0, 0, 0, 1], -1, -2)),
    "mask of the clamped code": (([-9, 0, 8], 1, 0, {}, 1), ([-8, 0, 7], [0, 1, 0], -1, -2)),
    "scale partial from dy": (([10, 0.3], 0.5, 0, {}, [2, 1]), ([3.5, 0.5], [0, 1], 14.4, -1)),
    "learned zero point drifts out": (([1, -3], 1, 9, {}, 1), ([0, -3], [0, 1], -1 + 1, -1)),
    "ties": (
        ([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 1, 0, {}, 1),
        ([0, 2, 2, 0, -2, -2], [1] * 6, 0, 0),
    ),
    "ties round before the zero point": (
        ([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 1, 1, {}, 1),
        ([0, 2, 2, 0, -2, -2], [1] * 6, 0, 0),
    ),
    "full range": (
        ([-8, -7.6, -7.4, 7.4, 7.6], 1, 0, {}, 1),
        ([-8, -8, -7, 7, 7], [1, 1, 1, 1, 0], 0 - 0.4 + 0.4 - 0.4 + 7, -1),
    ),
    "narrow range": (
        ([-8, -7.6, -7.4, 7.4, 7.6], 1, 0, NARROW, 1),
        ([-7, -7, -7, 7, 7], [0, 0, 1, 1, 0], -7 - 7 + 0.4 - 0.4 + 7, -3),
    ),
    "amax / 7.5 clips the largest": (
        ([3, -1, 1], 0.4, 0, {}, 1),
        ([2.8, -0.8, 0.8], [0, 1, 1], 7 + 0.5 - 0.5, -0.4),
    ),
    "lower bound": (([-2, -1.4], 0.5, 3, UNSIGNED, 1), ([-1.5, -1.5], [0, 1], -3.2, -0.5)),
    "lower bound, small": (
        ([-2e-4, -1.4e-4], 5e-5, 3, UNSIGNED, 1),
        ([-1.5e-4, -1.5e-4], [0, 1], -3.2, -5e-5),
    ),
    "channels of a transposed view": (
        ((np.arange(12).reshape(3, 4) - 6).T, [1, 2, 4, 0.5], [0] * 4, {"axis": 0},
         np.arange(12).reshape(4, 3)),
        ([[-6, -2, 2], [-4, 0, 4], [-4, 0, 4], [-3, 1, 3.5]],
         [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 0]], [0, 6, 0, 77], [0, 0, 0, -5.5]),
    ),
    "group of zeros": (
        ([0, 0, 0, 0, 1, 2, 3, 4], [1e-7, 0.5], [0, 0], {"group_size": 4}, 1),
        ([0, 0, 0, 0, 1, 2, 3, 3.5], [1, 1, 1, 1, 1, 1, 1, 0], [0, 7], [0, -0.5]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_known_cases(name):
    (x, scale, zero_point, form, gy), (y, dx, ds, dz) = CASES[name]
    x, scale, zero_point = array(x), array(scale), array(zero_point)
    gy = np.broadcast_to(array(gy), x.shape)
    call = lambda *a: fake_quantize(*a, **form)  # noqa: E731
    np.testing.assert_allclose(evaluate(call, x, scale, zero_point), y, rtol=2e-7)
    got = partials(call, gy, x, scale, zero_point)
    np.testing.assert_array_equal(got[0], array(dx))
    np.testing.assert_allclose(got[1], ds, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(got[2], dz, rtol=1e-6)
    reference = gradients(gy, x, scale, zero_point, Grid(**form))
    for ours, right in zip(got, reference, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-6, atol=1e-7)


def test_input_that_is_not_compact_is_refused():
    x = array(np.zeros((3, 4))).T
    executable = build(module(fake_quantize, variables(x, array(1))), TARGET)
    with pytest.raises(Exception, match="compact"):
        relax.VirtualMachine(executable, tvm.cpu())["main"](x, tvm.runtime.tensor(array(1)))


def test_integer_zero_point_has_no_gradient():
    gy, x, scale = array(np.ones(8)), array(B), array(0.5)
    call = lambda x, s: fake_quantize(x, s, relax.const(3, "int8"), signed=False)  # noqa: E731
    dx, ds = partials(call, gy, x, scale)
    np.testing.assert_array_equal(dx, [0, 1, 1, 1, 1, 1, 0, 0])
    np.testing.assert_allclose(ds, 20.2, rtol=1e-6)


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


def pipelines():
    """Names and ways to build a module for llvm."""

    def fused(mod, opt_level):
        target = tvm.target.Target("llvm")
        with tvm.transform.PassContext(opt_level=opt_level):
            return relax.build(mod, target, relax_pipeline=relax.get_default_pipeline(target))

    def plain(mod, opt_level):
        with tvm.transform.PassContext(opt_level=opt_level):
            return relax.build(mod, "llvm")

    return {
        "sits": lambda mod: build(mod, TARGET),
        **{f"plain, level {i}": (lambda mod, i=i: plain(mod, i)) for i in (0, 3)},
        **{f"fused, level {i}": (lambda mod, i=i: fused(mod, i)) for i in (1, 2)},
    }


@pytest.mark.parametrize("name", pipelines())
def test_same_codes_and_masks_however_compiled(name, rng):
    """Producers and consumers that fuse with the op must not move a tie."""
    grid = Grid(group_size=8)
    scale = np.exp2(rng.integers(-3, 1, (16, 4))).astype("float32")
    zero_point = rng.integers(-8, 8, (16, 4)).astype("float32")
    x = away_from_ties(rng, (16, 32), scale, zero_point, grid)
    x[::2] = np.rint(x[::2] * 16) / 16  # ties, exactly
    attrs = dict(fake_quantize(*variables(x, scale, zero_point), group_size=8).attrs.items())

    def graph(x, scale, zero_point):
        wide = relax.op.multiply(relax.op.multiply(x, CONST(3.0)), CONST(1.0 / 3.0))
        x = relax.op.where(relax.op.equal(wide, x), wide, x)
        y = relax.op.negative(fake_quantize(x, scale, zero_point, group_size=8))
        codes = quantize(x, scale, zero_point, group_size=8)
        back = dequantize(codes, scale, zero_point, group_size=8)
        grads = fake_quantize_grad(relax.op.ones_like(x), x, scale, zero_point, **attrs)
        return relax.Tuple([y, codes, back, grads])

    args = variables(x, scale, zero_point, symbolic="level 3" in name)
    executable = pipelines()[name](module(graph, args))
    y, codes, back, (dx, _, _) = run(executable, x, scale, zero_point)
    expected = quantized(x, scale, zero_point, grid)
    np.testing.assert_array_equal(codes, expected.code)
    np.testing.assert_array_equal(dx, expected.inside)
    np.testing.assert_array_equal(back, expected.value)
    np.testing.assert_array_equal(-y, expected.value)


def twin(x, scale, zero_point, lo, hi, index):
    """The straight-through surrogate in torch: rounding has gradient 1."""

    def rounded(v):
        return v + (v.round() - v).detach()

    z = zero_point + (zero_point.round().clamp(lo, hi) - zero_point).detach()
    s, z = scale.flatten()[index], z.flatten()[index]
    return (torch.clamp(rounded(x / s) + z, lo, hi) - z) * s


def surrogate(rng, with_zero_point):
    """gy and an upstream t of the shape of x; tangents of x, scale[, zero point]; and these."""
    scale = rng.uniform(0.1, 1, (4, 3)).astype("float32")
    zero_point = (rng.uniform(-3, 3, (4, 3)) * with_zero_point).astype("float32")
    x = away_from_ties(rng, (4, 10), scale, zero_point, Grid(group_size=4))
    inputs = [x, scale, zero_point][: 2 + with_zero_point]
    tangents = [rng.standard_normal(v.shape, "float32") for v in inputs]
    return rng.standard_normal((2, 4, 10), "float32"), tangents, inputs


def torch_products(upstreams, tangents, inputs):
    """<grad(gy), tangents> and <t, tangent of y> of the twin, with the tensors they depend on."""
    gy, t = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in upstreams)
    tangents, inputs = (
        [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]
        for values in (tangents, inputs)
    )
    rows = np.arange(40)
    index = torch.tensor((rows // 10 * 3 + rows % 10 // 4).reshape(4, 10))
    zero_point = inputs[2] if len(inputs) == 3 else torch.zeros(4, 3, dtype=torch.float64)
    y = twin(inputs[0], inputs[1], zero_point, -8, 7, index)
    first = torch.autograd.grad(y, inputs, gy, create_graph=True)
    product = sum((a * b).sum() for a, b in zip(first, tangents, strict=True))
    change = torch.autograd.grad(product, gy, create_graph=True)[0]
    return product, (change * t).sum(), [gy, *tangents, *inputs]


def assert_partials(function, arrays, loss, wrt):
    """Our partials of function(*arrays) for its last arguments against torch's of `loss`."""
    expected = torch.autograd.grad(loss, wrt, retain_graph=True, allow_unused=True)
    args = variables(*arrays)
    mod = relax.transform.Gradient("main", args[-len(wrt) :])(module(function, args))
    got = run(build(mod, TARGET), *arrays, function="main_adjoint")[1]
    for ours, right in zip(got, expected, strict=True):
        right = np.zeros(ours.shape) if right is None else right.numpy()
        np.testing.assert_allclose(ours, right, rtol=2e-6, atol=1e-12 + 2e-6 * abs(right).max())


@pytest.mark.parametrize("with_zero_point", [False, True])
def test_second_and_third_order_equal_the_twin(with_zero_point, rng):
    (gy, t), tangents, inputs = surrogate(rng, with_zero_point)
    count = len(inputs)
    attrs = dict(fake_quantize(*variables(*inputs), group_size=4).attrs.items())

    def second(gy, *rest):
        grads = relax.BlockBuilder.current().emit(fake_quantize_grad(gy, *rest[count:], **attrs))
        products = [relax.op.multiply(relax.TupleGetItem(grads, i), rest[i]) for i in range(count)]
        return functools.reduce(relax.op.add, map(relax.op.sum, products))

    def third(t, *rest):
        return relax.op.sum(relax.op.multiply(t, fake_quantize_tangent(*rest, **attrs)))

    product, change, (torch_gy, *others) = torch_products((gy, t), tangents, inputs)
    assert_partials(second, [gy, *tangents, *inputs], product, [torch_gy, *others])
    assert_partials(third, [t, *tangents, *inputs], change, others)
