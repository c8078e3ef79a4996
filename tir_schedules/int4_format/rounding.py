"""Round a float weight to codes, scales and zero points, in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from sits_tvm.config import QuantSpec

from .packed_layout import SYMMETRIC_ZERO, PackedLayout, code_range

Quantized: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Codes (N, Kp) uint8, scale (N, G), and zero points (N, G) uint8 or None when symmetric."""

MSE_RATIOS = np.linspace(1.0, 0.5, 26, dtype="float32")
"""Fractions of the full span that ``scale_method="mse"`` tries, widest first."""


def quantize(weight: np.ndarray, spec: QuantSpec) -> Quantized:
    """Codes (N, Kp) uint8, scale (N, G) and zero points (N, G) uint8 of a float32 weight (N, K).

    ``code = clip(rint(w / scale) + zero, *code_range(spec))`` with the scale as stored. Symmetric
    scales are amax / (2^(bits-1) - 1), that is amax / 7 (amax / 7.5 would clip the largest weight
    of a group); asymmetric ranges include 0. A group of zeros gets scale 1. ``zero point`` is None
    when symmetric.
    """
    n, k = weight.shape
    layout = PackedLayout(n, k, spec)
    groups = cut_groups(weight, layout)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError("the weight holds NaN or infinite values")
    scale, zero = scale_and_zero(low, high, spec, np.float32(1))
    if spec.scale_method == "mse":
        scale, zero = _least_squares(groups, low, high, spec)
    if not np.isfinite(scale).all():
        raise ValueError(
            f"a scale overflows {spec.scale_dtype}, the largest weight being "
            f"{max(high.max(), -low.min()):g}; "
            'use QuantSpec(scale_dtype="float32")'
        )
    codes = round_to_codes(groups, scale, zero, code_range(spec))
    codes = codes.astype("uint8").reshape(-1, layout.padded_k)
    return codes, scale, None if spec.symmetric else zero.astype("uint8")


def cut_groups(weight: np.ndarray, layout: PackedLayout) -> np.ndarray:
    """Float32 rows (N, K) to groups (N, G, g), zeros after a short last one."""
    rows, k = weight.shape
    groups = np.zeros((rows, layout.padded_k), "float32")
    groups[:, :k] = weight
    return groups.reshape(rows, layout.groups, layout.group_size)


def round_to_codes(
    groups: np.ndarray, scale: np.ndarray, zero: np.ndarray, bounds: tuple[int, int]
) -> np.ndarray:
    """``clip(rint(group / scale) + zero, *bounds)`` in float32, of groups (N, G, g)."""
    codes = groups / scale.astype("float32")[:, :, None]
    np.rint(codes, out=codes)
    codes += zero[:, :, None]
    return np.clip(codes, *bounds, out=codes)


def scale_and_zero(
    low: np.ndarray, high: np.ndarray, spec: QuantSpec, ratio: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """The stored scale and the zero point that span `ratio` of low…high, which holds 0."""
    levels = (1 << spec.bits) - 1
    reach, steps = (np.maximum(-low, high), levels // 2) if spec.symmetric else (high - low, levels)
    span = reach / np.float32(steps)
    with np.errstate(over="ignore"):
        scale = np.where(span == 0, np.float32(1), span * ratio).astype(spec.scale_dtype)
    scale = np.maximum(scale, np.finfo(spec.scale_dtype).smallest_subnormal)
    if spec.symmetric:
        return scale, np.full_like(low, SYMMETRIC_ZERO)
    return scale, np.clip(np.rint(-low * ratio / scale.astype("float32")), 0, levels)


def _least_squares(
    groups: np.ndarray, low: np.ndarray, high: np.ndarray, spec: QuantSpec
) -> tuple[np.ndarray, np.ndarray]:
    best = None
    for scale, zero in _candidates(low, high, spec):
        codes = round_to_codes(groups, scale, zero, code_range(spec))
        error = _squared_error(groups, codes - zero[:, :, None], scale)
        if best is None:
            best, best_scale, best_zero = error, scale, zero
            continue
        better = error < best
        best = np.where(better, error, best)
        best_scale, best_zero = (
            np.where(better, scale, best_scale),
            np.where(better, zero, best_zero),
        )
    return best_scale, best_zero


def _candidates(
    low: np.ndarray, high: np.ndarray, spec: QuantSpec
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return (scale_and_zero(low, high, spec, ratio) for ratio in MSE_RATIOS)


def _squared_error(groups: np.ndarray, levels: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Summed in float64 and in order, so that the same scale wins everywhere, FMA or not."""
    difference = (groups - levels.astype("float64") * scale[:, :, None]).astype("float32")
    squares = np.square(difference.transpose(2, 0, 1), dtype="float64")
    return np.add.reduce(squares, axis=0)
