"""Shapes, dtypes and code ranges of the INT4 weight format that `packing` defines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sits_tvm.config import QuantSpec

from .packed_order import CODES_PER_WORD, Index, Unit, unit_of, zero_unit_of

SYMMETRIC_ZERO = 8
"""The zero point of symmetric codes, of any width: signed codes are stored with 8 added."""


@dataclass(frozen=True)
class PackedLayout:
    """Shapes, dtypes and order of a packed weight W[n, k]."""

    n: int
    k: int
    spec: QuantSpec
    order: str = "rows"

    @property
    def group_size(self) -> int:
        """Elements per group as stored: per-channel groups are padded to whole words."""
        return (
            round_up(self.k, CODES_PER_WORD) if self.spec.group_size == -1 else self.spec.group_size
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
        unit = self.unit
        tiles, units = -(-self.n // unit.rows), -(-self.padded_k // unit.columns)
        widths = [(units, unit.words), (self.groups, unit.rows)]
        if not self.spec.symmetric:
            zeros = self.zero_unit
            widths.append((-(-self.groups // zeros.columns), zeros.words))
        return tuple((tiles, *width) for width in widths)

    @property
    def unit(self) -> Unit:
        return unit_of(self.order, self.spec.activation)

    @property
    def zero_unit(self) -> Unit:
        return zero_unit_of(self.order)

    @property
    def padding_code(self) -> int:
        """The code and the zero point of what lies beyond N or Kp."""
        return SYMMETRIC_ZERO if self.spec.symmetric else 0

    def code_at(self, row: Index, column: Index) -> tuple[tuple[Index, Index, Index], Index]:
        """The indices of the word, and the nibble in it, of the code of W[row, column]."""
        word, nibble = self.unit.place(row, column)
        return (row // self.unit.rows, column // self.unit.columns, word), nibble

    def zero_at(self, row: Index, group: Index) -> tuple[tuple[Index, Index, Index], Index]:
        """As `code_at`, of the zero point of a group."""
        word, nibble = self.zero_unit.place(row, group)
        return (row // self.zero_unit.rows, group // self.zero_unit.columns, word), nibble

    def origin(self, tile: Index, unit: Index, word: Index, nibble: Index) -> tuple[Index, Index]:
        """The row and the column whose code `code_at` finds there; they may lie in the padding."""
        row, column = self.unit.origin(word, nibble)
        return tile * self.unit.rows + row, unit * self.unit.columns + column

    def zero_origin(self, unit: Index, word: Index, nibble: Index) -> tuple[Index, Index]:
        """The row in its tile, and the group, whose zero point `zero_at` finds there."""
        row, group = self.zero_unit.origin(word, nibble)
        return row, unit * self.zero_unit.columns + group

    def lane_at(self, row: Index) -> tuple[Index, Index]:
        """The tile, and the lane in it, of the scales of a row."""
        return row // self.unit.rows, self.unit.lane(row)

    def row_at(self, tile: Index, lane: Index) -> Index:
        """The row of a lane; it may lie in the padding."""
        return tile * self.unit.rows + self.unit.row(lane)

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


def code_range(spec: QuantSpec) -> tuple[int, int]:
    """The smallest and the largest code: 0…15 for 4 bits; symmetric 3 bits are 4…11 around 8."""
    levels = 1 << spec.bits
    low = SYMMETRIC_ZERO - levels // 2 if spec.symmetric else 0
    return low, low + levels - 1


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
