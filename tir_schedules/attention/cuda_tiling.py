"""How the CUDA attention kernel is cut into blocks and tiles, and where those lie."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..cuda_ptx import CHUNK
from ..emit import ceildiv, int64
from .spec import AttentionSpec

ROWS = 64
"""Rows of a block, 16 for each warp."""

MOST_BLOCKS = 2**31 - 1
"""Of a grid along x."""

_STEP = 16
"""Widths in shared memory are multiples of it: the inner extent of a product on tensor cores."""


@dataclass(frozen=True)
class Tiling:
    """Sizes in elements. Rows in shared memory are 16 bytes apart from a multiple of 16 elements,
    so that the rows of a matrix lie in different banks.
    """

    spec: AttentionSpec

    @property
    def bytes(self) -> int:
        """Of an element."""
        return self.spec.q.dtype.itemsize

    @property
    def keys(self) -> int:
        """Keys of a tile: scores of 16 rows, and their results, stay in registers."""
        return 64 if self.bytes * max(self.width, self.value_width) <= 256 else 32

    @property
    def holds_queries(self) -> bool:
        """Whether the queries, too, stay in registers."""
        return self.width <= 128

    @property
    def width(self) -> int:
        """Of queries and keys in shared memory, filled up with zeros."""
        return -(-self.spec.head_dim // _STEP) * _STEP

    @property
    def value_width(self) -> int:
        return -(-self.spec.value_dim // _STEP) * _STEP

    @property
    def padding(self) -> int:
        """16 bytes between rows."""
        return CHUNK // self.bytes

    @property
    def pitch(self) -> int:
        """Of queries and keys."""
        return self.width + self.padding

    @property
    def value_pitch(self) -> int:
        return self.value_width + self.padding

    @property
    def first_key(self) -> int:
        """Where the keys start, behind the queries."""
        return ROWS * self.pitch

    @property
    def first_value(self) -> int:
        return self.first_key + self.keys * self.pitch

    @property
    def elements(self) -> int:
        return self.first_value + self.keys * self.value_pitch

    @property
    def num_rows(self) -> tirx.Expr:
        """Of a key/value head."""
        return self.spec.num_queries * self.spec.group

    @property
    def heads(self) -> tirx.Expr:
        """Key/value heads of all batches, at least 1: no grid is empty."""
        return tirx.max(self.spec.batch * self.spec.num_kv_heads, int64(1))

    @property
    def row_blocks(self) -> tirx.Expr:
        return tirx.max(ceildiv(self.num_rows, ROWS), int64(1))

    @property
    def blocks(self) -> tirx.Expr:
        return self.row_blocks * self.heads
