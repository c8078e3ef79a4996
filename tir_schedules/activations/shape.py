"""How the CUDA kernel that quantizes activations cuts a row, see `cuda`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx

from ..emit import int64
from ..int4_format.activation_format import UNIT, ActivationFormat

COLUMNS = 8
"""Of a thread at a time: two words of codes, a piece."""

UNIT_PIECES = UNIT // COLUMNS
WARP = 32
MOST_VECTORS = 8
"""Pieces of a thread."""

_SMALLEST_BLOCK, _THREADS, _MOST_THREADS = 128, 256, 1024


@dataclass(frozen=True)
class Shape:
    """How rows are cut: into `parts` of `columns` columns, each of `groups` groups; `words` are
    those of the codes of a row.
    """

    rows: tirx.Expr
    k: int
    parts: int
    columns: int
    groups: int
    words: int
    form: ActivationFormat

    @staticmethod
    def of(params: Sequence[tirx.Buffer], group_size: int, form: ActivationFormat) -> Shape:
        x, codes, scale, sums = params
        *rows, k = x.shape
        words, parts, groups = (int(buffer.shape[-1]) for buffer in (codes, scale, sums))
        count, columns = prod(rows, start=int64(1)), group_size * groups // parts
        return Shape(count, int(k), parts, columns, groups // parts, words, form)

    @property
    def parts_in_pairs(self) -> int:
        """Parts that threads are there for: two in a warp, where they share a unit."""
        is_pair = self.form.packed and self.parts > 1 and self.columns % UNIT
        return self.parts + self.parts % 2 if is_pair else self.parts

    @property
    def pieces(self) -> int:
        """Eight columns each, of a part."""
        return self.columns // COLUMNS

    @property
    def lanes(self) -> int:
        """Threads of a part, a power of two."""
        few = _power_of_two(-(-self.pieces // MOST_VECTORS))
        if self.form.packed and self.parts == 1:
            few = max(few, UNIT_PIECES)
        return min(max(min(_power_of_two(self.pieces), _THREADS), few), _MOST_THREADS)

    @property
    def vectors(self) -> int:
        """Pieces of a thread."""
        return -(-self.pieces // self.lanes)

    @property
    def group_lanes(self) -> int:
        """Threads of a group."""
        return self.lanes if self.groups == 1 else self.pieces // self.groups

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.lanes if self.lanes > WARP else _SMALLEST_BLOCK

    @property
    def parts_per_block(self) -> int:
        return self.threads // self.lanes


def _power_of_two(value: int) -> int:
    """The smallest that is no smaller."""
    return 1 << (value - 1).bit_length()
