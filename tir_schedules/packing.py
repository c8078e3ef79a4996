"""The INT4 weight format: its only definition, in NumPy.

A weight W[N, K] is cut along K into groups of g elements, G = ceil(K / g) of them; the last one may
be shorter. Element k of group j is ``(code - zero) * scale`` with a 4-bit code and the group's
scale and zero point (8 when symmetric). Fewer bits take a part of the range: `code_range`. Stored
are

- codes, uint32 (ceil(N / L), Kp / 8, L): the code of W[n, k] is nibble ``k % 8``, low nibble first,
  of word ``[n // L, k // 8, n % L]``. Kp = G * g; what lies beyond K or N is padding.
- scale, float16 or float32 (ceil(N / L), G, L).
- zero point, only when asymmetric, uint32 (ceil(N / L), ceil(G / 8), L): packed like the codes.

L, the number of *lanes*, is the order that a kernel wants: 16 puts 16 output channels side by side
for a CPU vector, 1 is plain rows (the last axis is then 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from sits_tvm.config import QuantSpec

from .packed_layout import CODES_PER_WORD, SYMMETRIC_ZERO, PackedLayout, round_up
from .rounding import Quantized, quantize

Parts: TypeAlias = tuple[np.ndarray, ...]
_CHUNK = 1 << 20  # elements quantized at a time, to bound temporary memory


def pack(weight: np.ndarray, spec: QuantSpec, lanes: int = 1) -> Parts:
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

    def rows_of(rows: slice) -> Quantized:
        return quantize(np.asarray(weight[rows], "float32"), spec)

    n, k = weight.shape
    return assemble(PackedLayout(n, k, spec, lanes), rows_of)


def stack(weights: Sequence[Parts]) -> Parts:
    """The parts of weights as those of one, stacked along N; each N but the last is whole tiles."""
    if len(weights) == 1:
        return weights[0]
    return tuple(np.concatenate(parts) for parts in zip(*weights, strict=True))


def assemble(layout: PackedLayout, quantized: Callable[[slice], Quantized]) -> Parts:
    """The parts of a weight whose codes, scales and zero points `quantized` gives by rows."""
    lanes, missing_code = layout.lanes, SYMMETRIC_ZERO if layout.spec.symmetric else 0
    out = tuple(np.zeros(s, d) for s, d in zip(layout.shapes, layout.dtypes, strict=True))
    step = max(1, _CHUNK // layout.padded_k // lanes) * lanes
    for start in range(0, layout.n, step):
        codes, scale, zero = quantized(slice(start, start + step))
        missing = -len(codes) % lanes  # rows that fill the last tile are zeros
        parts = [pack_nibbles(_with_rows(codes, missing, missing_code))]
        parts.append(_with_rows(scale, missing, 1))
        if zero is not None:
            parts.append(pack_nibbles(_with_rows(zero, missing, 0)))
        for whole, part in zip(out, parts, strict=True):
            tile = interleave(part, lanes)
            whole[start // lanes : start // lanes + len(tile)] = tile
    return out


def unpack(parts: Parts, layout: PackedLayout) -> np.ndarray:
    """The float32 weight (N, K) that packed parts stand for: ``(code - zero) * scale``."""
    rows = [deinterleave(part, layout.n) for part in parts]
    codes = unpack_nibbles(rows[0]).reshape(layout.n, layout.groups, layout.group_size)
    scale = rows[1].astype("float32")[:, :, None]
    zero = SYMMETRIC_ZERO if len(rows) == 2 else unpack_nibbles(rows[2])[:, : layout.groups, None]
    weight = (codes.astype("float32") - np.float32(zero)) * scale
    return weight.reshape(layout.n, layout.padded_k)[:, : layout.k]


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """(N, C) values 0…15 to (N, ceil(C / 8)) uint32, low nibble first."""
    n, count = values.shape
    padded = np.zeros((n, round_up(count, CODES_PER_WORD)), "uint32")
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


def _with_rows(rows: np.ndarray, count: int, value: int) -> np.ndarray:
    return np.pad(rows, ((0, count), (0, 0)), constant_values=value)
