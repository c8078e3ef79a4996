"""Affine quantization in float64 NumPy: fake quantize, its gradients, and inputs away from ties.

Codes come from x / scale in float32, as the ops define them; everything else is float64. Written
from the formulas, element by element over groups, so that it shares nothing with what it tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The arguments of `relax_passes.op.fake_quantize` of the same names."""

    bits: int = 4
    axis: int = -1
    group_size: int | None = None
    signed: bool = True
    narrow_range: bool = False
    clip_mask: str = "rounded"
    scale_dtype: str | None = None

    @property
    def range(self) -> tuple[int, int]:
        half = 2 ** (self.bits - 1)
        low, high = (-half, half - 1) if self.signed else (0, 2 * half - 1)
        return low + self.narrow_range, high

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """With `group_size`; without one it is () or (shape[axis],)."""
        size = shape[self.axis] if self.group_size == -1 else self.group_size
        groups = list(shape)
        groups[self.axis] = 1 if self.group_size == -1 else -(-shape[self.axis] // size)
        return tuple(groups)


def group_numbers(shape: tuple[int, ...], param_shape: tuple[int, ...], grid: Grid) -> np.ndarray:
    """For each element of x the flat index of its scale."""
    if param_shape == ():
        return np.zeros(shape, int)
    index = list(np.indices(shape))
    if grid.group_size is None:
        return index[grid.axis]
    size = shape[grid.axis] if grid.group_size == -1 else grid.group_size
    index[grid.axis] = index[grid.axis] // max(size, 1)
    return np.ravel_multi_index(index, param_shape) if np.prod(shape) else np.zeros(shape, int)


@dataclass(frozen=True)
class Quantized:
    """Per element: code q, value y, inside the range, and the factors of gy in ds and in dz."""

    code: np.ndarray
    value: np.ndarray
    inside: np.ndarray
    scale_factor: np.ndarray
    zero_point_factor: np.ndarray


def quantized(x, scale, zero_point=None, grid: Grid = Grid()) -> Quantized:
    """`x` in float16 or float32; `scale` and `zero_point` in any dtype, of the shape they have."""
    low, high = grid.range
    groups = group_numbers(x.shape, np.shape(scale), grid)
    stored = np.asarray(scale if grid.scale_dtype is None else scale.astype(grid.scale_dtype))
    step32 = stored.astype("float32").ravel()[groups]
    zero = np.zeros(np.shape(scale)) if zero_point is None else np.asarray(zero_point, "float64")
    zero = np.clip(np.rint(zero), low, high).ravel()[groups]
    step = step32.astype("float64")
    with np.errstate(all="ignore"):
        ratio = x.astype("float32") / step32
        rounded = np.rint(ratio.astype("float64"))
        before = rounded + zero
        nan = np.isnan(ratio)
        code = np.where(nan, zero, np.clip(before, low, high))
        if grid.clip_mask == "strict":
            exact = ratio + zero.astype("float32")
            inside = (exact > low) & (exact < high)
        else:
            inside = (before >= low) & (before <= high)
        error = rounded - x.astype("float64") / step
        scale_factor = np.where(inside, error, code - zero)
    return Quantized(
        code,
        np.where(nan, np.nan, (code - zero) * step),
        inside,
        np.where(nan, 0.0, scale_factor),
        np.where(inside | nan, 0.0, -step),
    )


def gradients(gy, x, scale, zero_point=None, grid: Grid = Grid()):
    """(dx, ds, dz) of sum(gy · fake_quantize(x)), in float64."""
    dx, (ds, dz) = _partials(gy, x, scale, zero_point, grid, lambda terms: terms)
    return dx, ds, dz


def magnitudes(gy, x, scale, zero_point=None, grid: Grid = Grid()):
    """sum |terms| of each element of ds and dz: what their rounding is measured against."""
    return _partials(gy, x, scale, zero_point, grid, np.abs)[1]


def _partials(gy, x, scale, zero_point, grid, of_terms):
    q = quantized(x, scale, zero_point, grid)
    groups = group_numbers(x.shape, np.shape(scale), grid).ravel()
    gy = gy.astype("float64")
    sums = []
    for factor in (q.scale_factor, q.zero_point_factor):
        with np.errstate(invalid="ignore"):
            terms = np.where(factor == 0, 0.0, gy * factor).ravel()
        weights, count = of_terms(terms), int(np.prod(np.shape(scale)))
        total = np.bincount(groups, weights, count) if count != 1 else weights.sum()
        sums.append(total.reshape(np.shape(scale)))
    return np.where(q.inside, gy, 0.0), sums


def away_from_ties(rng, shape, scale, zero_point=None, grid: Grid = Grid(), reach: int = 3):
    """float32 x = scale · (code - z' + U(-0.4, 0.4)), also up to `reach` codes outside the range.

    One rounding error in x / scale does not move such an x to another code, nor over the edge of
    the range.
    """
    low, high = grid.range
    groups = group_numbers(shape, np.shape(scale), grid)
    stored = np.asarray(scale if grid.scale_dtype is None else scale.astype(grid.scale_dtype))
    zero = np.zeros(np.shape(scale)) if zero_point is None else np.asarray(zero_point, "float64")
    zero = np.clip(np.rint(zero), low, high).ravel()[groups]
    code = rng.integers(low - reach, high + reach + 1, shape)
    x = (code - zero + rng.uniform(-0.4, 0.4, shape)) * stored.astype("float64").ravel()[groups]
    return x.astype("float32")
