"""The INT4 weight format: its only definition, in NumPy.

A weight W[N, K] is cut along K into groups of g elements, G = ceil(K / g) of them; the last one may
be shorter. Element k of group j is ``(code - zero) * scale`` with a 4-bit code and the group's
scale and zero point (8 when symmetric). Stored are

- codes, uint32 (ceil(N / L), Kp / 8, L): the code of W[n, k] is nibble ``k % 8``, low nibble first,
  of word ``[n // L, k // 8, n % L]``. Kp = G * g; what lies beyond K or N is padding.
- scale, float16 or float32 (ceil(N / L), G, L).
- zero point, only when asymmetric, uint32 (ceil(N / L), ceil(G / 8), L): packed like the codes.

L, the number of *lanes*, is the order that a kernel wants: 16 puts 16 output channels side by side
for a CPU vector, 1 is plain rows (the last axis is then 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sits_tvm.config import QuantSpec

CODES_PER_WORD = 8
MSE_RATIOS = np.linspace(1.0, 0.5, 26, dtype="float32")
"""Fractions of the full span that ``scale_method="mse"`` tries, widest first."""

_CHUNK = 1 << 20  # elements quantized at a time, to bound temporary memory


@dataclass(frozen=True)
class PackedLayout:
    """Shapes and dtypes of a packed weight W[n, k]."""

    n: int
    k: int
    spec: QuantSpec
    lanes: int = 1

    @property
    def group_size(self) -> int:
        """Elements per group as stored: per-channel groups are padded to whole words."""
        return (
            _round_up(self.k, CODES_PER_WORD)
            if self.spec.group_size == -1
            else self.spec.group_size
        )

    @property
    def groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def padded_k(self) -> int:
        return self.groups * self.group_size

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes of (codes, scale) or, when asymmetric, (codes, scale, zero point)."""
        rows = -(-self.n // self.lanes)
        widths = [self.padded_k // CODES_PER_WORD, self.groups]
        if not self.spec.symmetric:
            widths.append(-(-self.groups // CODES_PER_WORD))
        return tuple((rows, width, self.lanes) for width in widths)

    @property
    def names(self) -> tuple[str, ...]:
        return ("codes", "scale", "zero_point")[: len(self.shapes)]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("uint32", self.spec.scale_dtype, "uint32")[: len(self.shapes)]

    @property
    def nbytes(self) -> int:
        sizes = (
            np.prod(s) * np.dtype(d).itemsize for s, d in zip(self.shapes, self.dtypes, strict=True)
        )
        return int(sum(sizes))


def pack(weight: np.ndarray, spec: QuantSpec, lanes: int = 1) -> tuple[np.ndarray, ...]:
    """Quantize and pack a weight.

    Parameters
    ----------
    weight : float array of shape (N, K)
        Finite; half-precision input is computed in float32.
    spec : QuantSpec
    lanes : int

    Returns
    -------
    (codes, scale) or (codes, scale, zero_point)
        As `PackedLayout` describes them.

    Raises
    ------
    ValueError
        On a weight that is not finite, or whose scale overflows ``spec.scale_dtype``.
    """
    n, k = weight.shape
    layout = PackedLayout(n, k, spec, lanes)
    out = tuple(np.zeros(s, d) for s, d in zip(layout.shapes, layout.dtypes, strict=True))
    step = max(1, _CHUNK // layout.padded_k // lanes) * lanes
    for start in range(0, n, step):
        rows = np.asarray(weight[start : start + step], "float32")
        padding = -len(rows) % lanes  # missing rows are stored as zeros
        codes, scale, zero = quantize(np.pad(rows, ((0, padding), (0, 0))), spec)
        parts = (
            (pack_nibbles(codes), scale)
            if zero is None
            else (pack_nibbles(codes), scale, pack_nibbles(zero))
        )
        for whole, part in zip(out, parts, strict=True):
            tile = interleave(part, lanes)
            whole[start // lanes : start // lanes + len(tile)] = tile
    return out


def unpack(parts: tuple[np.ndarray, ...], layout: PackedLayout) -> np.ndarray:
    """The float32 weight (N, K) that packed parts stand for: ``(code - zero) * scale``."""
    rows = [deinterleave(part, layout.n) for part in parts]
    codes = unpack_nibbles(rows[0]).reshape(layout.n, layout.groups, layout.group_size)
    scale = rows[1].astype("float32")[:, :, None]
    zero = 8.0 if len(rows) == 2 else unpack_nibbles(rows[2])[:, : layout.groups, None]
    weight = (codes.astype("float32") - np.float32(zero)) * scale
    return weight.reshape(layout.n, layout.padded_k)[:, : layout.k]


def quantize(
    weight: np.ndarray, spec: QuantSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes (N, Kp) uint8, scale (N, G) and zero points (N, G) uint8 of a float32 weight (N, K).

    ``code = clip(rint(w / scale) + zero, 0, 15)`` with the scale as stored. Symmetric scales are
    amax / 7 (amax / 7.5 would clip the largest weight of a group); asymmetric ranges include 0.
    A group of zeros gets scale 1. ``zero point`` is None when symmetric.
    """
    n, k = weight.shape
    layout = PackedLayout(n, k, spec)
    groups = np.zeros((n, layout.padded_k), "float32")
    groups[:, :k] = weight
    groups = groups.reshape(n, layout.groups, layout.group_size)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError("the weight holds NaN or infinite values")
    scale, zero = _scale_and_zero(low, high, spec, np.float32(1))
    if spec.scale_method == "mse":
        scale, zero = _least_squares(groups, low, high, spec)
    if not np.isfinite(scale).all():
        raise ValueError(
            f"a scale overflows {spec.scale_dtype}, the largest weight being "
            f"{max(high.max(), -low.min()):g}; "
            'use QuantSpec(scale_dtype="float32")'
        )
    codes = _codes(groups, scale, zero).astype("uint8").reshape(n, layout.padded_k)
    return codes, scale, None if spec.symmetric else zero.astype("uint8")


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """(N, C) values 0…15 to (N, ceil(C / 8)) uint32, low nibble first."""
    n, count = values.shape
    padded = np.zeros((n, _round_up(count, CODES_PER_WORD)), "uint32")
    padded[:, :count] = values
    shifts = 4 * np.arange(CODES_PER_WORD, dtype="uint32")
    return np.bitwise_or.reduce(padded.reshape(n, -1, CODES_PER_WORD) << shifts, axis=-1)


def unpack_nibbles(words: np.ndarray) -> np.ndarray:
    """(N, W) uint32 to (N, 8 W) uint8 values 0…15."""
    shifts = 4 * np.arange(CODES_PER_WORD, dtype="uint32")
    return (words[:, :, None] >> shifts & 15).astype("uint8").reshape(len(words), -1)


def interleave(rows: np.ndarray, lanes: int) -> np.ndarray:
    """(N, C) to (N / lanes, C, lanes)."""
    return np.ascontiguousarray(rows.reshape(-1, lanes, rows.shape[1]).swapaxes(1, 2))


def deinterleave(tiles: np.ndarray, n: int) -> np.ndarray:
    """The first n rows of what was interleaved: (ceil(n / lanes), C, lanes) to (n, C)."""
    return tiles.swapaxes(1, 2).reshape(-1, tiles.shape[1])[:n]


def _scale_and_zero(
    low: np.ndarray, high: np.ndarray, spec: QuantSpec, ratio: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    span = (
        np.maximum(-low, high) / np.float32(7) if spec.symmetric else (high - low) / np.float32(15)
    )
    with np.errstate(over="ignore"):
        scale = np.where(span == 0, np.float32(1), span * ratio).astype(spec.scale_dtype)
    scale = np.maximum(scale, np.finfo(spec.scale_dtype).smallest_subnormal)
    if spec.symmetric:
        return scale, np.full_like(low, 8)
    return scale, np.clip(np.rint(-low * ratio / scale.astype("float32")), 0, 15)


def _codes(groups: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    codes = groups / scale.astype("float32")[:, :, None]
    np.rint(codes, out=codes)
    codes += zero[:, :, None]
    return np.clip(codes, 0, 15, out=codes)


def _least_squares(
    groups: np.ndarray, low: np.ndarray, high: np.ndarray, spec: QuantSpec
) -> tuple[np.ndarray, np.ndarray]:
    best = None
    for scale, zero in _candidates(low, high, spec):
        codes = _codes(groups, scale, zero)
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
    return (_scale_and_zero(low, high, spec, ratio) for ratio in MSE_RATIOS)


def _squared_error(groups: np.ndarray, levels: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Summed in float64 and in order, so that the same scale wins everywhere, FMA or not."""
    difference = (groups - levels.astype("float64") * scale[:, :, None]).astype("float32")
    squares = np.square(difference.transpose(2, 0, 1), dtype="float64")
    return np.add.reduce(squares, axis=0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
