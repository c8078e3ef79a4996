"""Fake quantize and its gradient as kernels: values against float64, codes against torch."""

from __future__ import annotations

from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest
import torch
from quantize_reference import Grid, away_from_ties, gradients, magnitudes, quantized
from quantize_runs import attributes, backward, both, evaluate, forward, module, variables
from tvm import relax

from relax_passes.op import fake_quantize, quantize
from relax_passes.op._fake_quantize_gradient import fake_quantize_grad
from sits_tvm import build, lower

SHAPE = (3, 64, 56)
GRANULARITIES = {
    "tensor": Grid(),
    "channel, first axis": Grid(axis=0),
    "channel, middle axis": Grid(axis=1),
    "channel, last axis": Grid(axis=-1),
    "groups of 8": Grid(group_size=8),
    "groups of 32, last one shorter": Grid(group_size=32),
    "groups of 5": Grid(group_size=5),
    "one group": Grid(group_size=-1),
    "groups of 16, middle axis": Grid(axis=-2, group_size=16),
    "groups of 2, first axis": Grid(axis=0, group_size=2),
}


def parameter_shape(name, grid, shape=SHAPE):
    if name == "tensor":
        return ()
    return (shape[grid.axis],) if grid.group_size is None else grid.scale_shape(shape)


def draw(rng, name, grid, shape=SHAPE):
    """gy, x, scale, zero point; x away from ties."""
    param = parameter_shape(name, grid, shape)
    scale = np.asarray(rng.uniform(0.05, 2.0, param), "float32")
    zero_point = np.asarray(rng.uniform(*grid.range, param), "float32")
    x = away_from_ties(rng, shape, scale, zero_point, grid)
    gy = (rng.choice([-1.0, 1.0], shape) * 10 ** rng.uniform(-6, 3, shape)).astype("float32")
    return gy, x, scale, zero_point


def assert_gradients(got, gy, x, scale, zero_point, grid):
    """dx bit for bit; sums to 1e-6 of their terms one by one, and of their norm as a whole."""
    dx, *expected = gradients(gy, x, scale, zero_point, grid)
    np.testing.assert_array_equal(got[0], dx.astype("float32"))
    bounds = magnitudes(gy, x, scale, zero_point, grid)
    for value, right, bound in zip(got[1:], expected, bounds, strict=False):
        assert value.shape == right.shape
        assert (np.abs(value - right) <= 1e-6 * bound).all()
        assert np.linalg.norm(value - right) <= 1e-6 * np.linalg.norm(right)


@pytest.mark.parametrize("name", GRANULARITIES)
def test_forward_and_gradients_equal_the_reference(name, rng):
    grid = GRANULARITIES[name]
    gy, x, scale, zero_point = draw(rng, name, grid)
    expected = quantized(x, scale, zero_point, grid)
    value, got = both(gy, x, scale, zero_point, **asdict(grid))
    np.testing.assert_array_equal(value, expected.value.astype("float32"))
    assert 0.1 < expected.inside.mean() < 0.9
    assert_gradients(got, gy, x, scale, zero_point, grid)


@pytest.mark.parametrize(
    ("bits", "signed", "narrow_range", "clip_mask"),
    [
        (2, True, False, "rounded"),
        (2, False, True, "strict"),
        (3, True, True, "rounded"),
        (4, True, False, "strict"),
        (5, False, False, "rounded"),
        (6, False, True, "rounded"),
        (7, True, True, "strict"),
        (8, True, False, "rounded"),
        (8, False, False, "strict"),
    ],
)
def test_every_range_and_mask(bits, signed, narrow_range, clip_mask, rng):
    grid = Grid(
        bits=bits, signed=signed, narrow_range=narrow_range, clip_mask=clip_mask, group_size=16
    )
    gy, x, scale, zero_point = draw(rng, "groups", grid, (4, 40))
    form = asdict(grid)
    expected = quantized(x, scale, zero_point, grid)
    # 0.4 of a step from the edge of a code is clear of rounding, also for the strict mask
    attrs = attributes(x, scale, zero_point, **form)

    def codes_and_gradients(gy, *args):
        return relax.Tuple([quantize(*args, **form), fake_quantize_grad(gy, *args, **attrs)])

    codes, got = evaluate(codes_and_gradients, gy, x, scale, zero_point)
    np.testing.assert_array_equal(codes, expected.code)
    assert codes.dtype == ("int8" if signed else "uint8")
    assert set(np.unique(codes)) <= set(range(grid.range[0], grid.range[1] + 1))
    assert_gradients(got, gy, x, scale, zero_point, grid)


@pytest.mark.parametrize("name", ["tensor", "channel, first axis", "channel, last axis"])
def test_equals_torch_bit_for_bit(name, rng):
    """Forward and dx of torch's fake quantize, also for ties and integer zero points."""
    grid = GRANULARITIES[name]
    shape = (128, 96)
    scale = np.asarray(rng.uniform(0.05, 2.0, parameter_shape(name, grid, shape)), "float32")
    zero_point = np.asarray(rng.integers(-8, 8, scale.shape), "int32")
    x = away_from_ties(rng, shape, scale, zero_point, grid)
    x[::7] = (np.rint(x[::7] * 2) / 2).astype("float32")  # ties where the scale is a power of two
    gy = rng.standard_normal(shape, "float32")
    tensor = torch.tensor(x, requires_grad=True)
    if name == "tensor":
        y = torch.fake_quantize_per_tensor_affine(
            tensor, torch.tensor(scale), torch.tensor(zero_point), -8, 7
        )
    else:
        y = torch.fake_quantize_per_channel_affine(
            tensor, torch.tensor(scale), torch.tensor(zero_point), grid.axis % 2, -8, 7
        )
    y.backward(torch.tensor(gy))
    form = asdict(grid)
    value, (dx, _) = both(gy, x, scale, zero_point, **form)
    np.testing.assert_array_equal(value, y.detach().numpy())
    np.testing.assert_array_equal(dx, tensor.grad.numpy())


def test_divides_and_does_not_multiply_by_a_reciprocal(rng):
    """Half steps of scales that are no powers of two: a reciprocal moves some of these ties."""
    scale = rng.uniform(0.1, 1, 512).astype("float32")
    x = ((np.arange(-9, 9) + 0.5)[:, None] * scale).astype("float32")
    expected = quantized(x, scale).code
    wrong = np.clip(np.rint(x * (np.float32(1) / scale)), -8, 7)
    assert (wrong != expected).sum() > 100
    np.testing.assert_array_equal(evaluate(quantize, x, scale), expected)
    np.testing.assert_array_equal(forward(x, scale), quantized(x, scale).value.astype("float32"))


@pytest.mark.parametrize("size", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_one_scale_for_a_large_tensor(size, rng):
    """A sequential float32 sum of so many terms would be off by percents."""
    scale, zero_point = np.float32(0.37), np.float32(1.2)
    x, gy = (rng.standard_normal((size, size), "float32") for _ in range(2))
    x *= 2
    got = backward(gy, x, np.asarray(scale), np.asarray(zero_point))
    assert_gradients(got, gy, x, scale, zero_point, Grid())


@pytest.mark.parametrize("grid", [Grid(), Grid(axis=1), Grid(group_size=16)], ids=str)
def test_symbolic_rows_give_the_same_bits(grid, rng):
    name = "tensor" if grid == Grid() else "other"
    gy, x, scale, zero_point = draw(rng, name, grid, (24, 40))
    value, got = both(gy, x, scale, zero_point, symbolic=True, **asdict(grid))
    expected, static = both(gy, x, scale, zero_point, **asdict(grid))
    np.testing.assert_array_equal(value, expected)
    for a, b in zip(got, static, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("shape", "symbolic"), [((0,), False), ((0, 3), False), ((0, 3), True), ((4, 0), False)]
)
@pytest.mark.parametrize("grid", [Grid(), Grid(axis=-1), Grid(group_size=2)], ids=str)
def test_empty_tensor_has_zero_gradients(shape, symbolic, grid):
    """torch 2.13 returns the scale and the zero point themselves."""
    param = () if grid == Grid() else parameter_shape("other", grid, shape)
    x = np.zeros(shape, "float32")
    scale, zero_point = np.full(param, 0.5, "float32"), np.ones(param, "float32")
    form = asdict(grid)
    value, (dx, ds, dz) = both(x, x, scale, zero_point, symbolic=symbolic, **form)
    assert value.shape == shape
    assert dx.shape == shape
    np.testing.assert_array_equal(ds, np.zeros(param))
    np.testing.assert_array_equal(dz, np.zeros(param))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_scale_is_rounded_to_the_dtype_it_is_deployed_in(dtype, rng):
    grid = Grid(group_size=8, scale_dtype=dtype.__name__)
    gy, x, scale, zero_point = draw(rng, "groups", grid, (16, 64))
    stored = scale.astype(dtype).astype("float32")
    assert (scale != stored).any()
    form = asdict(grid)
    value = forward(x, scale, zero_point, **form)
    np.testing.assert_array_equal(value, forward(x, stored, zero_point, group_size=8))
    got = backward(gy, x, scale, zero_point, **form)
    assert_gradients(got, gy, x, scale, zero_point, grid)


def test_each_direction_is_one_kernel():
    x = np.zeros((64, 64), "float32")
    scale = np.ones((64, 2), "float32")
    args = variables(x, x, scale, scale)
    call = fake_quantize(*args[1:], group_size=32)
    forth = lower(module(lambda gy, *rest: fake_quantize(*rest, group_size=32), args), "llvm")[1]
    back = lower(
        module(lambda *a: fake_quantize_grad(*a, **dict(call.attrs.items())), args), "llvm"
    )[1]
    assert [k.family for k in forth.kernels] == ["CpuFallback"]
    assert [k.family for k in back.kernels] == ["FakeQuantizeGradient"]
    assert len(forth.kernels) == len(back.kernels) == 1


def gradients_for_cuda():
    """A module of the kernel per tensor, channel and group."""
    x, scales = np.zeros((64, 96), "float32"), [(), (64,), (64, 3)]
    grids = [Grid(), Grid(axis=0), Grid(group_size=32)]
    args = variables(x, x, *(np.ones(shape, "float32") for shape in scales))

    def all_of_them(gy, x, *scales):
        calls = []
        for scale, grid in zip(scales, grids, strict=True):
            attrs = dict(fake_quantize(x, scale, scale, **asdict(grid)).attrs.items())
            calls.append(fake_quantize_grad(gy, x, scale, scale, **attrs))
        return relax.Tuple(calls)

    return module(all_of_them, args)


def test_every_sum_has_a_thread_on_a_gpu():
    """dlight's reduction would run a whole tensor with one scale in one thread."""
    mod, report = lower(gradients_for_cuda(), "cuda -arch=sm_90")
    assert [kernel.family for kernel in report.kernels] == ["GroupSums"] * 3
    assert "T.grid(T.int64(64), T.int64(96))" not in mod.script()


@pytest.mark.slow
def test_compiles_for_cuda():
    executable = build(gradients_for_cuda(), "cuda -arch=sm_90")
    assert {kernel.family for kernel in executable.report.kernels} == {"GroupSums"}
