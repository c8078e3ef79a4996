"""How the operands of a CUDA INT4 product arrive in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from .cuda_ptx import copy_chunk
from .cuda_wgmma import ROW_BYTES, swizzled
from .matmul_cuda_block import Block, int64_of
from .matmul_cuda_tile import CHANNELS, LANES, PIECE, UNIT, UNIT_BYTES, ZERO_BYTES, ZERO_GROUPS

_CONTIGUOUS = 8
"""Pieces of a row, a cache line, that threads side by side have at least."""


@dataclass(frozen=True)
class Copies:
    """The asynchronous copies of a block, shared out among the warps that read a slice."""

    block: Block

    @property
    def _all_units_exist(self) -> bool:
        return self.block.operands.units % self.block.tile.step_units == 0

    def start(self, first_unit: tirx.Expr, slice_: tirx.Expr) -> None:
        """Start to copy the operands of a slice."""
        self._codes(first_unit, slice_)
        self._activations(first_unit, slice_)
        if self.block.stage.groups:
            self._scales(first_unit, slice_)
        if self.block.stage.has_zeros:
            self._zeros(first_unit, slice_)
        if self.block.stage.groups and self.block.operands.is_quantized:
            self._activation_scales(first_unit, slice_)

    def _codes(self, first_unit: tirx.Expr, slice_: tirx.Expr) -> None:
        codes, units = self.block.operands.weight.codes, self.block.operands.units
        per_tile = self.block.tile.units * UNIT_BYTES // PIECE
        for tile, piece, more, is_mine in self._pieces(self.block.tile.channel_tiles, per_tile):
            at = first_unit + piece // LANES, piece % LANES * (PIECE // 4)
            source = codes[self.block.channel(tile), *map(int64_of, at)]
            exists = self._all_units_exist or first_unit + (piece + more) // LANES < units
            to = (tile * per_tile + piece + more) * PIECE
            self._copy(slice_, to, source, more * PIECE, exists, PIECE, is_mine)

    def _activations(self, first_unit: tirx.Expr, slice_: tirx.Expr) -> None:
        operands, stage = self.block.operands, self.block.stage
        each = operands.per_element
        size = math.gcd(operands.k, PIECE * UNIT // stage.unit_bytes)  # columns of a piece
        per_row, wide = self.block.tile.units * UNIT // size, size * stage.unit_bytes // UNIT
        for row, piece, more, is_mine in self._pieces(stage.tokens * stage.terms, per_row):
            at = first_unit * (UNIT // each) + piece * (size // each)
            source = operands.x[self._row(row) * (operands.k // each) + int64_of(at)]
            exists = self._whole_columns or at + more * (size // each) < operands.k // each
            to = self._place(row, (piece + more) * wide)
            self._copy(slice_, to, source, more * wide, exists, wide, is_mine)

    def _copy(
        self,
        slice_: tirx.Expr,
        to: tirx.Expr,
        source: tirx.Expr,
        offset: int,
        exists: tirx.Expr | bool,
        size: int,
        is_mine: tirx.Expr | bool,
    ) -> None:
        """From `offset` bytes behind `source` on: a constant that is no part of an index."""
        address = T.address_of(source)
        if offset:
            address = T.handle_add_byte_offset(address, offset)
        copy_chunk(slice_, to, address, exists, size, is_mine)

    def _place(self, row: tirx.Expr, byte: tirx.Expr) -> tirx.Expr:
        """Of a byte of activations in its slice, see `Stage`."""
        stage = self.block.stage
        if not self.block.tile.wgmma:
            return stage.activations + row * stage.pitch + byte
        atoms = byte // ROW_BYTES * (stage.tokens * ROW_BYTES)
        return stage.activations + atoms + swizzled(row, byte % ROW_BYTES)

    def _row(self, row: tirx.Expr) -> tirx.Expr:
        """The last one instead of those behind it; their results are dropped."""
        block, terms = self.block, self.block.stage.terms
        here = block.first_row * terms + int64_of(row)
        return tirx.min(here, block.operands.rows * terms - 1) if block.stage.tokens > 1 else here

    def _activation_scales(self, first_unit: tirx.Expr, slice_: tirx.Expr) -> None:
        """Scales of quantized activations and, for zero points, sums."""
        operands, stage = self.block.operands, self.block.stage
        scales, sums, together = operands.x_scale, operands.x_sums, operands.groups_per_scale
        assert scales is not None
        assert sums is not None
        for row, piece, is_mine in self._whole_pieces(stage.token_pitch, stage.groups):
            exists = self.block.group(first_unit) + piece < operands.groups
            group = tirx.min(self.block.group(first_unit) + piece, operands.groups - 1)
            at = (piece * stage.token_pitch + row) * 4
            here = tirx.min(self.block.first_row + int64_of(row), operands.rows - 1)
            part, parts = group // together, operands.groups // together
            source = scales[here * parts + int64_of(part)]
            copy_chunk(slice_, stage.activation_scales + at, T.address_of(source), True, 4, is_mine)
            if stage.has_zeros:
                source = sums[here * operands.groups + int64_of(group)]
                to = stage.activation_sums + at
                copy_chunk(slice_, to, T.address_of(source), exists, 4, is_mine)

    @property
    def _whole_columns(self) -> bool:
        """Whether activations have all columns that units have, which may end with padding."""
        return self._all_units_exist and self.block.operands.k == self.block.operands.units * UNIT

    def _scales(self, first_unit: tirx.Expr, slice_: tirx.Expr) -> None:
        stage, scale = self.block.stage, self.block.operands.weight.scale
        per_group = CHANNELS * stage.scale_width // PIECE
        per_tile = stage.groups * per_group
        for tile, piece, is_mine in self._whole_pieces(self.block.tile.channel_tiles, per_tile):
            group = self.block.group(first_unit) + piece // per_group
            if self.block.operands.groups % (stage.groups * self.block.tile.warps_k):
                group = tirx.min(group, self.block.operands.groups - 1)
            first = piece % per_group * (PIECE // stage.scale_width)
            at = self.block.channel(int64_of(tile)), int64_of(group), int64_of(first)
            to = stage.scales + (tile * per_tile + piece) * PIECE
            copy_chunk(slice_, to, T.address_of(scale[at]), True, PIECE, is_mine)

    def _zeros(self, first_unit: tirx.Expr, slice_: tirx.Expr) -> None:
        """Words of four groups."""
        stage, zeros = self.block.stage, self.block.operands.weight.zero_point
        assert zeros is not None
        per_tile = stage.zero_words * ZERO_BYTES // PIECE
        for tile, piece, is_mine in self._whole_pieces(self.block.tile.channel_tiles, per_tile):
            last = (self.block.operands.groups - 1) // ZERO_GROUPS
            word = self.block.group(first_unit) // ZERO_GROUPS + piece // (ZERO_BYTES // PIECE)
            first = piece % (ZERO_BYTES // PIECE) * (PIECE // 4)
            at = self.block.channel(int64_of(tile)), int64_of(tirx.min(word, last)), int64_of(first)
            to = stage.zeros + (tile * per_tile + piece) * PIECE
            copy_chunk(slice_, to, T.address_of(zeros[at]), True, PIECE, is_mine)

    def _pieces(
        self, rows: int, per_row: int
    ) -> Iterator[tuple[tirx.Expr, tirx.Expr, int, tirx.Expr | bool]]:
        """What this thread copies, of those that share its slice: rows, and of each some pieces.

        They are (row, piece + more): threads side by side have pieces side by side. `more` is a
        constant, and rows are few, since a copy takes a small constant in its address for free.
        """
        sharing = self.block.tile.warps_n * self.block.tile.warps_m
        threads = sharing * LANES
        thread = self.block.warp % sharing * LANES + self.block.lane
        across = min(per_row, max(_CONTIGUOUS, threads // rows))
        while per_row % across or threads % across:
            across -= 1
        down = threads // across
        for step in range(-(-rows // down)):
            row = thread // across + step * down
            is_mine = True if rows % down == 0 else row < rows
            for more in range(0, per_row, across):
                yield row, thread % across, more, is_mine

    def _whole_pieces(
        self, rows: int, per_row: int
    ) -> Iterator[tuple[tirx.Expr, tirx.Expr, tirx.Expr | bool]]:
        for row, piece, more, is_mine in self._pieces(rows, per_row):
            yield row, piece + more, is_mine
