"""Gradients of separate quantize and dequantize ops, ours and TVM's, and of round and clip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantize_reference import Grid, away_from_ties, gradients, magnitudes
from quantize_runs import TARGET, module, run, variables
from tvm import relax

from relax_passes.op import dequantize, quantize
from sits_tvm import build


def partials(call, gy, *arrays):
    """Those of sum(gy · call(*arrays)), by TVM's own `Gradient`."""
    args = variables(*arrays, gy)

    def loss(*inputs):
        return relax.op.sum(relax.op.multiply(call(*inputs[:-1]), inputs[-1]))

    floats = [arg for arg in args[:-1] if "float" in str(arg.ty.dtype)]
    mod = relax.transform.Gradient("main", floats)(module(loss, args))
    return run(build(mod, TARGET), *arrays, gy, function="main_adjoint")[1]


def assert_pair(got, gy, x, scale, zero_point, grid):
    """A pair sums ds in two parts, each rounded: 2e-6 of the larger terms it adds."""
    dx, *sums = gradients(gy, x, scale, zero_point, grid)
    np.testing.assert_allclose(got[0], dx, rtol=3e-7)
    np.testing.assert_array_equal(got[0] == 0, dx == 0)
    spread = 2 * (grid.range[1] - grid.range[0])
    bounds = magnitudes(np.abs(gy), x, scale, zero_point, grid)
    for value, right, bound in zip(got[1:], sums, bounds, strict=False):
        np.testing.assert_allclose(value, right, atol=2e-7 * spread * (1 + bound.max()), rtol=1e-5)


@pytest.mark.parametrize(
    "grid", [Grid(), Grid(axis=0), Grid(group_size=8), Grid(axis=0, group_size=3)], ids=str
)
@pytest.mark.parametrize("zero_point_dtype", ["float32", "int8"])
def test_pair_has_the_gradient_of_fake_quantize(grid, zero_point_dtype, rng):
    shape = (8, 20)
    param = (8,) if grid.axis == 0 else ()
    param = grid.scale_shape(shape) if grid.group_size else param
    scale = np.asarray(rng.uniform(0.1, 1, param), "float32")
    zero_point = np.asarray(rng.integers(-4, 4, param), zero_point_dtype)
    x = away_from_ties(rng, shape, scale, zero_point, grid)
    gy = rng.standard_normal(shape, "float32")
    form = {"axis": grid.axis, "group_size": grid.group_size}

    def pair(x, *parameters):
        return dequantize(quantize(x, *parameters, **form), *parameters, **form)

    got = partials(pair, gy, x, scale, zero_point)
    assert len(got) == (3 if zero_point_dtype == "float32" else 2)
    assert_pair(got, gy, x, scale, zero_point, grid)


@pytest.mark.parametrize(("group_axis", "shape"), [(-1, (8,)), (0, (8, 1))])
def test_groups_are_not_interleaved(group_axis, shape):
    q = np.arange(1, 9, dtype="int8").reshape(shape)
    scale = np.array([1, 10], "float32").reshape(-1, *shape[1:])
    gy = np.ones(shape, "float32")
    form = {"axis": group_axis, "group_size": 4}
    (ds,) = partials(lambda q, s: dequantize(q, s, **form), gy, q, scale)
    np.testing.assert_array_equal(ds.ravel(), [10, 26])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_zero_point_of_any_integer_dtype(dtype):
    """uint8 arithmetic would wrap 0 - 5 to 251."""
    q, zero_point = np.array([0, 3], "uint8"), np.array(5, dtype)
    form = {"signed": False, "bits": 8}
    (ds,) = partials(
        lambda *a: dequantize(*a, **form), np.ones(2, "float32"), q, np.float32(0.5), zero_point
    )
    assert ds == -7


@pytest.mark.parametrize("scale", [0.1234567, 20000.0])
def test_half_precision_values_do_not_round_the_scale_gradient(scale):
    """float16 holds neither 7 · 0.1234567 nor 7 · 20000."""
    q, zero_point = np.arange(-8, 8, dtype="int8"), np.float32(2.4)
    got = partials(
        lambda *a: relax.op.astype(dequantize(*a, out_dtype="float16"), "float32"),
        np.ones(16, "float32"), q, np.float32(scale), zero_point,
    )  # fmt: skip
    assert got[0] == (q - 2.0).sum()
    np.testing.assert_allclose(got[1], -16 * scale, rtol=1e-6)


@pytest.mark.parametrize("parameter_shape", [(), (1,), (20,)])
@pytest.mark.parametrize(("out_dtype", "bits", "signed"), [("int8", 8, True), ("uint8", 8, False)])
def test_pair_of_tvm(parameter_shape, out_dtype, bits, signed, rng):
    grid = Grid(bits=bits, signed=signed)
    scale = np.asarray(rng.uniform(0.1, 1, parameter_shape), "float32")
    zero_point = np.asarray(rng.integers(0, 100, parameter_shape), "int32")
    ours = (scale, zero_point) if parameter_shape != (1,) else (scale[0], zero_point[0])
    x = away_from_ties(rng, (8, 20), *ours, grid, reach=60)
    gy = rng.standard_normal((8, 20), "float32")

    def pair(x, s, z):
        codes = relax.op.quantize(x, s, z, axis=1, out_dtype=out_dtype)
        return relax.op.dequantize(codes, s, z, axis=1)

    got = partials(pair, gy, x, scale, zero_point)
    assert got[1].shape == parameter_shape
    assert_pair((got[0], got[1].reshape(np.shape(ours[0]))), gy, x, *ours, grid)


def test_range_is_that_of_the_dtype():
    """40000 is a code of uint16, not of int16."""
    x, one, zero = np.array([40000, -3], "float32"), np.float32(1), np.array(0, "int32")
    for out_dtype, expected in (("int16", [0, 1]), ("uint16", [1, 0])):
        call = lambda x, s, z, t=out_dtype: relax.op.astype(  # noqa: E731
            relax.op.quantize(x, s, z, out_dtype=t), "float32"
        )
        dx, _ = partials(call, np.ones(2, "float32"), x, one, zero)
        np.testing.assert_array_equal(dx, expected)


def test_float_zero_point_of_tvm(rng):
    """float16 is the only float that `relax.quantize` takes as a zero point."""
    scale, zero_point = np.float32(0.5), np.float16(3)
    grid = Grid(bits=8)
    x = away_from_ties(rng, (40,), scale, zero_point, grid, reach=60)
    gy = np.ones(40, "float32")

    def pair(x, s, z):
        return relax.op.dequantize(relax.op.quantize(x, s, z), s, z)

    got = partials(pair, gy, x, scale, zero_point)
    _, ds, dz = gradients(gy, x, scale, zero_point, grid)
    assert got[2].dtype == "float16"
    np.testing.assert_allclose(got[1], ds, rtol=1e-5)
    np.testing.assert_allclose(got[2], dz, rtol=1e-3)


def test_round_passes_the_gradient_through():
    gy = np.array([0.3, -0.9, 1.7, 200], "float32")
    x = np.array([1.2, 2.7, -3.1, 0.4], "float32")
    np.testing.assert_array_equal(partials(relax.op.round, gy, x)[0], gy)


def test_clip_is_that_of_torch():
    x = np.array([-2, -1, 0.5, 2, 3, np.nan, np.inf], "float32")
    gy = np.arange(1, 8, dtype="float32")
    tensor = torch.tensor(x, requires_grad=True)
    torch.clamp(tensor, -1, 2).backward(torch.tensor(gy))
    (dx,) = partials(lambda x: relax.op.clip(x, -1, 2), gy, x)
    np.testing.assert_array_equal(dx, tensor.grad.numpy())
