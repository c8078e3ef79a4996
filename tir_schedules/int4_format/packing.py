"""The INT4 weight format: its only definition, in NumPy.

A weight W[N, K] is cut along K into groups of g elements, G = ceil(K / g) of them; the last one may
be shorter. Element k of group j is ``(code - zero) * scale`` with a 4-bit code and the group's
scale and zero point (8 when symmetric). Fewer bits take a part of the range: `code_range`. Stored
are

- codes, uint32 (ceil(N / R), ceil(Kp / C), R C / 8): units of R output channels and C columns, of
  8 codes to a word. Kp = G * g; what lies beyond K or N is padding.
- scale, float16 or float32 (ceil(N / R), G, R).
- zero point, only when asymmetric, uint32 (ceil(N / R), ceil(G / 8), R): packed along G, group j in
  nibble ``j % 8``, low nibble first; of "fragments" (ceil(N / R), ceil(G / 4), 8).

R, C and the place of each code in its unit are the *order* that a kernel wants (`packed_order`):

- "rows": R = 1, C = 8. The code of W[n, k] is nibble ``k % 8`` of word [n, k // 8, 0].
- "vectors": R = 16, C = 8. It is nibble ``k % 8`` of word [n // 16, k // 8, n % 16]: 16 output
  channels side by side for a CPU vector.
- "fragments": R = 16, C = 64. Words 4 l to 4 l + 3 of a unit are what lane l of a warp holds of the
  operand A (16 x C) of `mma.sync`. With r = n % 16, c = k % 64 and l = 4 (r % 8) + t:

  - With activations in float, t = c % 8 // 2. The code is nibble
    ``r // 8 + c // 8 % 2 * 2 + c % 2 * 4`` of word ``4 l + c // 16``: an m16n8k16 for each word.
  - With INT8 or INT4 activations, column c is byte p = c // 8 * 8 + c % 2 * 4 + c % 8 // 2 of
    theirs, see `int8_matmul`, and t = p % 16 // 4. The code is nibble ``p // 32 + p % 4 * 2`` of
    word ``4 l + r // 8 + p // 16 % 2 * 2``: an m16n8k32 for the low nibbles of bytes, one for the
    high; or an m16n8k64.

  The scale of channel r is at ``r // 8 + r % 8 * 2``: r and r + 8 are neighbours. Its zero point of
  group j is nibble ``r // 8 + j % 4 * 2`` of word [n // 16, j // 4, r % 8].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from sits_tvm.config import QuantSpec

from .packed_layout import SYMMETRIC_ZERO, PackedLayout, round_up
from .packed_order import CODES_PER_WORD, Unit
from .rounding import Quantized, quantize

Parts: TypeAlias = tuple[np.ndarray, ...]
_CHUNK = 1 << 20  # elements quantized at a time, to bound temporary memory


def pack(weight: np.ndarray, spec: QuantSpec, order: str = "rows") -> Parts:
    """Quantize and pack a weight.

    Parameters
    ----------
    weight : float array of shape (N, K)
        Finite; half-precision input is computed in float32.
    spec : QuantSpec
    order : str

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
    return assemble(PackedLayout(n, k, spec, order), rows_of)


def stack(weights: Sequence[Parts]) -> Parts:
    """The parts of weights as those of one, stacked along N; each N but the last is whole tiles."""
    if len(weights) == 1:
        return weights[0]
    return tuple(np.concatenate(parts) for parts in zip(*weights, strict=True))


def assemble(layout: PackedLayout, quantized: Callable[[slice], Quantized]) -> Parts:
    """The parts of a weight whose codes, scales and zero points `quantized` gives by rows."""
    rows, code = layout.unit.rows, layout.padding_code
    out = tuple(np.zeros(s, d) for s, d in zip(layout.shapes, layout.dtypes, strict=True))
    step = max(1, _CHUNK // layout.padded_k // rows) * rows
    for start in range(0, layout.n, step):
        codes, scale, zero = quantized(slice(start, start + step))
        padded = np.pad(codes, ((0, -len(codes) % rows), (0, 0)), constant_values=code)
        parts = [_pack(padded, layout.unit, code), _in_lanes(scale, layout)]
        if zero is not None:
            parts.append(_pack(np.pad(zero, ((0, -len(zero) % rows), (0, 0))), layout.zero_unit, 0))
        for whole, part in zip(out, parts, strict=True):
            whole[start // rows : start // rows + len(part)] = part
    return out


def unpack(parts: Parts, layout: PackedLayout) -> np.ndarray:
    """The float32 weight (N, K) that packed parts stand for: ``(code - zero) * scale``."""
    codes, scale, zero = unpack_parts(parts, layout)
    groups = codes.reshape(layout.n, layout.groups, layout.group_size).astype("float32")
    zeros = np.float32(SYMMETRIC_ZERO) if zero is None else zero.astype("float32")[:, :, None]
    weight = (groups - zeros) * scale.astype("float32")[:, :, None]
    return weight.reshape(layout.n, layout.padded_k)[:, : layout.k]


def unpack_parts(parts: Parts, layout: PackedLayout) -> Quantized:
    """The codes, scales and zero points of packed parts: the inverse of `assemble`."""
    codes, scale, *zero = parts
    n, groups = layout.n, layout.groups
    rows = _unpack(codes, layout.unit)[:n, : layout.padded_k]
    zeros = _unpack(zero[0], layout.zero_unit)[:n, :groups] if zero else None
    return rows, _in_rows(scale, layout), zeros


def _pack(codes: np.ndarray, unit: Unit, padding: int) -> np.ndarray:
    """(N, C) values 0…15 to (N / unit.rows, units, unit.words) uint32."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % unit.columns)), constant_values=padding)
    tiles, units = len(padded) // unit.rows, padded.shape[1] // unit.columns
    by_unit = padded.reshape(tiles, unit.rows, units, unit.columns).swapaxes(1, 2)
    row, column = unit.origin(*np.indices((unit.words, CODES_PER_WORD)))
    ordered = by_unit.reshape(tiles * units, -1)[:, row * unit.columns + column]
    return pack_nibbles(ordered.reshape(-1, CODES_PER_WORD)).reshape(tiles, units, unit.words)


def _unpack(words: np.ndarray, unit: Unit) -> np.ndarray:
    """The inverse of `_pack`, with the padding."""
    tiles, units, _ = words.shape
    word, nibble = unit.place(*np.indices((unit.rows, unit.columns)))
    by_unit = unpack_nibbles(words.reshape(tiles * units, unit.words))
    ordered = by_unit[:, word * CODES_PER_WORD + nibble]
    by_row = ordered.reshape(tiles, units, unit.rows, unit.columns).swapaxes(1, 2)
    return by_row.reshape(tiles * unit.rows, -1)


def _in_lanes(rows: np.ndarray, layout: PackedLayout) -> np.ndarray:
    """(N, C) to (tiles, C, lanes)."""
    lanes = layout.unit.rows
    padded = np.pad(rows, ((0, -len(rows) % lanes), (0, 0)), constant_values=1)
    order = layout.row_at(np.arange(len(padded)) // lanes, np.arange(len(padded)) % lanes)
    return interleave(padded[order], lanes)


def _in_rows(tiles: np.ndarray, layout: PackedLayout) -> np.ndarray:
    """The inverse of `_in_lanes`, without the padding."""
    lanes = layout.unit.rows
    tile, lane = layout.lane_at(np.arange(layout.n))
    return deinterleave(tiles, len(tiles) * lanes)[tile * lanes + lane]


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
