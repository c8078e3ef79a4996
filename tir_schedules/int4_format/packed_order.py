"""The orders in which packed weights hold their codes, see `packing`.

A unit is the smallest block of a weight whose codes fill whole words in sequence. An order says
which digits of a code's row and column in the unit make its nibble in a word, and which the word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from sits_tvm.config import INTEGER_ACTIVATIONS

ORDERS = "rows", "vectors", "fragments"
Index: TypeAlias = Any
"""An int, an array of them, or an expression of TIR."""

CODES_PER_WORD = 8
_ROW, _COLUMN = 0, 1
Digit: TypeAlias = tuple[int, int, int]
"""(axis, divisor, extent): ``axis // divisor % extent``, of the row or the column."""


@dataclass(frozen=True)
class Unit:
    """A unit, and the digits that give the nibble and the word of a code, fastest first."""

    nibble: tuple[Digit, ...]
    word: tuple[Digit, ...]

    @property
    def rows(self) -> int:
        return _extent(self._digits(_ROW))

    @property
    def columns(self) -> int:
        return _extent(self._digits(_COLUMN))

    @property
    def words(self) -> int:
        return _extent(self.word)

    def place(self, row: Index, column: Index) -> tuple[Index, Index]:
        """The word in its unit, and the nibble in that, of the code of W[row, column]."""
        at = row, column
        return _join(self.word, at), _join(self.nibble, at)

    def origin(self, word: Index, nibble: Index) -> tuple[Index, Index]:
        """The row and the column in the unit whose code is there."""
        pairs = list(zip(_split(self.word, word), _split(self.nibble, nibble), strict=True))
        return sum(pairs[_ROW]), sum(pairs[_COLUMN])

    def lane(self, row: Index) -> Index:
        """Where the scale and the zero point of a row are among those of its unit."""
        return _join(self._digits(_ROW), (row, 0))

    def row(self, lane: Index) -> Index:
        """The row in the unit of a scale or a zero point."""
        return _split(self._digits(_ROW), lane)[_ROW]

    def _digits(self, axis: int) -> tuple[Digit, ...]:
        return tuple(digit for digit in self.nibble + self.word if digit[0] == axis)


def _extent(digits: Sequence[Digit]) -> int:
    return prod(extent for _, _, extent in digits)


def _join(digits: Sequence[Digit], at: tuple[Index, Index]) -> Index:
    """The number that the digits of ``at`` make."""
    total, stride = 0, 1
    for axis, divisor, extent in digits:
        total = at[axis] // divisor % extent * stride + total
        stride *= extent
    return total


def _split(digits: Sequence[Digit], number: Index) -> list[Index]:
    """What the digits of a number add to the row and to the column."""
    totals: list[Index] = [0, 0]
    stride = 1
    for axis, divisor, extent in digits:
        totals[axis] = number // stride % extent * divisor + totals[axis]
        stride *= extent
    return totals


_ROWS = Unit(nibble=((_COLUMN, 1, 8),), word=((_ROW, 1, 1),))
_VECTORS = Unit(nibble=((_COLUMN, 1, 8),), word=((_ROW, 1, 16),))
# A of mma m16n8k16 in float16: four words of a lane for four instructions.
_FLOAT_FRAGMENTS = Unit(
    nibble=((_ROW, 8, 2), (_COLUMN, 8, 2), (_COLUMN, 1, 2)),
    word=((_COLUMN, 16, 4), (_COLUMN, 2, 4), (_ROW, 1, 8)),
)
# A of mma m16n8k32 in int8, k in the order of the bytes of `int8_matmul`: the low and the high
# nibbles of a lane's four words are the registers of two instructions. And of m16n8k64 in int4,
# whose A they are as they lie there, k in the order of the nibbles of packed activations.
_INT8_FRAGMENTS = Unit(
    nibble=((_COLUMN, 32, 2), (_COLUMN, 2, 4)),
    word=((_ROW, 8, 2), (_COLUMN, 16, 2), (_COLUMN, 1, 2), (_COLUMN, 8, 2), (_ROW, 1, 8)),
)
# Zero points of four groups: those of the two rows that a lane has of A share a byte.
_ZERO_FRAGMENTS = Unit(nibble=((_ROW, 8, 2), (_COLUMN, 1, 4)), word=((_ROW, 1, 8),))
_UNITS: dict[str, tuple[Unit, Unit]] = {
    "rows": (_ROWS, _ROWS),
    "vectors": (_VECTORS, _VECTORS),
    "fragments": (_FLOAT_FRAGMENTS, _INT8_FRAGMENTS),
}


def unit_of(order: str, activation: str | None = None) -> Unit:
    """The unit of an order, for products with activations of `QuantSpec.activation`."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; write one of {', '.join(map(repr, ORDERS))}")
    return _UNITS[order][activation in INTEGER_ACTIVATIONS]


def zero_unit_of(order: str) -> Unit:
    """The unit of zero points, whose columns are groups."""
    return _ZERO_FRAGMENTS if order == "fragments" else unit_of(order)


def channels_together(order: str) -> int:
    """Output channels whose codes share words or lie side by side: a weight is padded to these."""
    return unit_of(order).rows
