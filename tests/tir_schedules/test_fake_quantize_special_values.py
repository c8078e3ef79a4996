"""Fake quantize of scalars, half precision, infinities, NaN and bad scales."""

from __future__ import annotations

import numpy as np
import pytest
from quantize_reference import Grid, gradients, quantized
from quantize_runs import backward, evaluate, forward

from relax_passes.op import dequantize, quantize


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scalar(dtype):
    x, scale = np.asarray(10, dtype), np.asarray(0.5, dtype)
    assert forward(x, scale) == 3.5
    dx, ds = backward(np.asarray(2, dtype), x, scale)
    assert (dx, ds) == (0, 14)
    assert dx.dtype == ds.dtype == dtype


def test_float16_computes_in_float32(rng):
    """x = ±0.0500183, scale 0.0999756: the ratio is just above a half, in float16 it is a tie."""
    x, scale = np.array([0.0500183, -0.0500183], "float16"), np.asarray(0.0999756, "float16")
    np.testing.assert_array_equal(evaluate(quantize, x, scale), [1, -1])
    grid = Grid(group_size=8)
    x = rng.standard_normal((16, 64)).astype("float16")
    gy = rng.standard_normal((16, 64)).astype("float16")
    scale = np.full((16, 8), 0.21, "float16")
    got = backward(gy, x, scale, group_size=8)
    dx, ds, _ = gradients(gy, x, scale, grid=grid)
    np.testing.assert_array_equal(got[0], dx)
    np.testing.assert_array_equal(got[1], ds.astype("float16"))


def test_bfloat16_forward(rng):
    x = rng.standard_normal((8, 32), "float32").astype("bfloat16")
    scale = np.full((8, 4), 0.21, "float32")
    expected = quantized(x.astype("float32"), scale, grid=Grid(group_size=8)).value
    value = forward(x, scale, group_size=8)
    np.testing.assert_array_equal(value, expected.astype("float32").astype("bfloat16"))


def test_infinities_clip_and_nan_stays(rng):
    x = np.array([np.inf, -np.inf, np.nan, 1], "float32")
    scale, zero_point = np.asarray(1, "float32"), np.asarray(2, "float32")
    np.testing.assert_array_equal(forward(x, scale), [7, -8, np.nan, 1])
    np.testing.assert_array_equal(evaluate(quantize, x, scale), [7, -8, 0, 1])
    np.testing.assert_array_equal(evaluate(quantize, x, scale, zero_point), [7, -8, 2, 3])
    dx, ds, dz = backward(np.ones(4, "float32"), x, scale, zero_point)
    np.testing.assert_array_equal(dx, [0, 0, 0, 1])
    assert (ds, dz) == (5 - 10, -2)


def test_infinite_upstream_gradient_of_a_clipped_element_is_no_nan():
    gy, x = np.array([np.inf, 1], "float32"), np.array([10, 0.25], "float32")
    dx, _ = backward(gy, x, np.asarray(0.5, "float32"))
    np.testing.assert_array_equal(dx, [0, 1])


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan])
def test_bad_scale_at_run_time_is_as_documented(scale):
    """0 stands for 0 whatever the code; x = 0 and NaN scales are NaN; a negative scale mirrors."""
    x = np.array([-1.0, 0.0, 1.0], "float32")
    value = forward(x, np.asarray(scale, "float32"))
    expected = {0.0: [-0.0, np.nan, 0.0], -0.5: x}.get(scale, [np.nan] * 3)
    np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_dequantize_subtracts_without_wrapping(dtype):
    q, zero_point = np.array([0, 3], "uint8"), np.array(5, dtype)
    value = evaluate(
        lambda *a: dequantize(*a, signed=False, bits=8), q, np.asarray(0.5, "float32"), zero_point
    )
    np.testing.assert_array_equal(value, [-2.5, -1])
