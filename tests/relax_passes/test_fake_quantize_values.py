"""R.sits.fake_quantize on known inputs, and with the same codes however it is compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from quantize_reference import Grid, away_from_ties, gradients, quantized
from quantize_runs import TARGET, both, module, run, variables
from tvm import relax

from relax_passes.op import dequantize, fake_quantize, quantize
from relax_passes.op._fake_quantize_gradient import fake_quantize_grad
from sits_tvm import build

NAN, INF = float("nan"), float("inf")
CONST = relax.const


def array(values, dtype="float32"):
    return np.asarray(values, dtype)


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


# torch has other codes for NaN, and refuses a zero point that is no code.
NOT_OF_TORCH = ("not finite", "learned zero point drifts out")


@pytest.mark.parametrize("name", CASES)
def test_known_cases(name):
    (x, scale, zero_point, form, gy), (y, dx, ds, dz) = CASES[name]
    x, scale, zero_point = array(x), array(scale), array(zero_point)
    gy = np.broadcast_to(array(gy), x.shape)
    value, got = both(gy, x, scale, zero_point, **form)
    np.testing.assert_allclose(value, y, rtol=2e-7)
    np.testing.assert_array_equal(got[0], array(dx))
    np.testing.assert_allclose(got[1], ds, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(got[2], dz, rtol=1e-6)
    reference = gradients(gy, x, scale, zero_point, Grid(**form))
    for ours, right in zip(got, reference, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [c for c in CASES if c not in NOT_OF_TORCH])
def test_known_cases_of_torch(name):
    """The table is right: y and dx are those of torch, groups as channels of a matrix."""
    (x, scale, zero_point, form, gy), (y, dx, *_) = CASES[name]
    grid = Grid(**form)
    tensor = torch.tensor(array(x), requires_grad=True)
    rows = tensor.reshape(max(np.size(scale), 1), -1)
    parameters = [torch.tensor(np.ravel(array(p)).tolist()) for p in (scale, zero_point)]
    out = torch.fake_quantize_per_channel_affine(
        rows, parameters[0], parameters[1].int(), 0, *grid.range
    )
    (out.reshape(tensor.shape) * torch.tensor(array(gy))).sum().backward()
    np.testing.assert_allclose(out.detach().reshape(tensor.shape), y, rtol=2e-7)
    np.testing.assert_array_equal(tensor.grad, array(dx))


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
