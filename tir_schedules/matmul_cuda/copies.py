"""How the operands of a CUDA INT4 product arrive in shared memory.

An operand is a matrix, of which a block copies some rows, in each stage the bytes behind those of
the stage before. A thread keeps one address of each, to which every copy adds a number of bytes.
Zeros arrive for rows and bytes that there are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.sym import Analyzer
from tvm.tirx.script import builder as T

from ..cuda_ptx import copy_chunk
from ..cuda_wgmma import ROW_BYTES, swizzled
from ..emit import Index, int32_variable, int64
from ..tir_nodes import is_const
from .block import Block, int64_of
from .tile import CHANNELS, LANES, PIECE, UNIT, UNIT_BYTES, ZERO_BYTES, ZERO_GROUPS

_CONTIGUOUS = 8
"""Pieces of a row, a cache line, that threads side by side have at least."""


@dataclass(frozen=True)
class Rows:
    """Rows of an operand that a block reads: `count` of them from `first` on.

    `pitch` are the bytes of a row, `left` is how many rows there are; None: all that are read.
    """

    buffer: tirx.Buffer
    pitch: int
    first: tirx.Expr
    count: int
    left: tirx.Expr | None


@dataclass(frozen=True)
class Pieces:
    """What arrives of a row in a stage, in pieces of `size` bytes.

    Those of stage s start `first + further(s)` bytes behind the start of the row; the first part is
    added up once. `are_there`: no stage has pieces behind the end of the row.
    """

    size: int
    per_row: int
    first: Index
    further: Callable[[Index], Index]
    are_there: bool


@dataclass(frozen=True)
class Stream:
    """What a thread copies of an operand.

    It is `piece` of `row`, whose `address` in the first stage it keeps, every `across`th piece
    behind it, and the same of every `down`th row below; `left` are the bytes of a row from there.
    """

    rows: Rows
    pieces: Pieces
    place: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
    address: tirx.Expr
    left: tirx.Expr
    row: tirx.Expr
    piece: tirx.Expr
    down: int
    across: int

    def start(self, step: Index, slice_: tirx.Expr) -> None:
        """Start to copy what a stage has; stages count from the first one of this block."""
        further, count = self.pieces.further(step), self.rows.count
        address = T.Bind(_behind(self.address, int64_of(further)))
        whole = count // self.down
        if whole:
            with T.unroll(whole) as index:
                self._copy_row(index * self.down, address, further, slice_, True)
        if count % self.down:
            below = whole * self.down
            self._copy_row(below, address, further, slice_, self.row + below < count)

    def _copy_row(
        self,
        below: Index,
        address: tirx.Expr,
        further: Index,
        slice_: tirx.Expr,
        is_mine: tirx.Expr | bool,
    ) -> None:
        size = self.pieces.size
        line = T.Bind(_behind(address, int64_of(below) * self.rows.pitch))
        with T.unroll(self.pieces.per_row // self.across) as index:
            more = index * self.across
            is_there = self._is_there(below, further + more * size)
            to = self.place(self.row + below, (self.piece + more) * size)
            copy_chunk(slice_, to, _behind(line, int64_of(more * size)), is_there, size, is_mine)

    def _is_there(self, below: Index, byte: Index) -> tirx.Expr | bool:
        found = [] if self.rows.left is None else [self.row + below < self.rows.left]
        if not self.pieces.are_there:
            found.append(byte < self.left)
        return tirx.all(*found) if found else True


def _behind(address: tirx.Expr, byte: tirx.Expr) -> tirx.Expr:
    return address if is_const(byte, 0) else T.handle_add_byte_offset(address, byte)


@dataclass(frozen=True)
class Copies:
    """The asynchronous copies of a block, shared out among the warps that read a slice.

    `first_unit` is the first of this warp's slice in the first stage of the block.
    """

    block: Block
    first_unit: tirx.Expr

    def streams(self) -> list[Stream]:
        stage, is_quantized = self.block.stage, self.block.operands.is_quantized
        found = [self._codes(), self._activations()]
        if stage.groups:
            found.append(self._scales())
        if stage.has_zeros:
            found.append(self._zeros())
        if stage.groups and is_quantized:
            found.append(self._activation_scales())
        if stage.has_zeros and is_quantized:
            found.append(self._activation_sums())
        return found

    @property
    def _steps(self) -> int:
        """Stages of all blocks along k."""
        return self.block.operands.steps(self.block.tile)

    def _codes(self) -> Stream:
        operands, size = self.block.operands, self.block.tile.units * UNIT_BYTES
        rows = self._channels(operands.weight.codes, operands.units * UNIT_BYTES)
        pieces = self._following(rows, PIECE, self.first_unit * UNIT_BYTES, size)
        return self._stream(rows, pieces, lambda row, byte: row * size + byte)

    def _activations(self) -> Stream:
        operands, stage = self.block.operands, self.block.stage
        pitch = operands.k * stage.unit_bytes // UNIT
        rows = self._tokens(operands.x, pitch, stage.tokens * stage.terms, stage.terms)
        first, per_stage = self.first_unit * stage.unit_bytes, stage.tile.units * stage.unit_bytes
        pieces = self._following(rows, math.gcd(pitch, PIECE), first, per_stage)
        return self._stream(rows, pieces, self._place)

    def _place(self, row: tirx.Expr, byte: tirx.Expr) -> tirx.Expr:
        """Of a byte of activations in its slice, see `Stage`."""
        stage = self.block.stage
        if not self.block.tile.wgmma:
            return stage.activations + row * stage.pitch + byte
        atoms = byte // ROW_BYTES * (stage.tokens * ROW_BYTES)
        return stage.activations + atoms + swizzled(row, byte % ROW_BYTES)

    def _scales(self) -> Stream:
        operands, stage = self.block.operands, self.block.stage
        group = CHANNELS * stage.scale_width
        rows = self._channels(operands.weight.scale, operands.groups * group)
        first, size = self.block.group(self.first_unit) * group, stage.groups * group
        pieces = self._following(rows, PIECE, first, size)
        return self._stream(rows, pieces, lambda row, byte: stage.scales + row * size + byte)

    def _zeros(self) -> Stream:
        """Words of four groups; stages of fewer share one."""
        operands, stage = self.block.operands, self.block.stage
        zeros, size = operands.weight.zero_point, stage.zero_words * ZERO_BYTES
        assert zeros is not None
        rows = self._channels(zeros, -(-operands.groups // ZERO_GROUPS) * ZERO_BYTES)
        pieces = self._of_groups(PIECE, size, ZERO_GROUPS, ZERO_BYTES)
        return self._stream(rows, pieces, lambda row, byte: stage.zeros + row * size + byte)

    def _activation_scales(self) -> Stream:
        operands, stage = self.block.operands, self.block.stage
        scales, together = operands.x_scale, operands.groups_per_scale
        assert scales is not None
        return self._words(scales, together, stage.parts, stage.activation_scales)

    def _activation_sums(self) -> Stream:
        sums = self.block.operands.x_sums
        assert sums is not None
        return self._words(sums, 1, self.block.stage.groups, self.block.stage.activation_sums)

    def _words(self, buffer: tirx.Buffer, together: int, per_stage: int, start: int) -> Stream:
        """A word of each token, for so many groups `together`."""
        operands, stage = self.block.operands, self.block.stage
        rows = self._tokens(buffer, operands.groups // together * 4, stage.token_pitch)
        pieces = self._of_groups(4, per_stage * 4, together, 4)
        return self._stream(
            rows, pieces, lambda row, byte: start + byte * stage.token_pitch + stage.place(row) * 4
        )

    def _of_groups(self, size: int, per_stage: int, together: int, each: int) -> Pieces:
        """In rows that have `each` bytes for some groups `together`; stages may share these."""
        groups = self.block.stage.groups
        first, more, apart = self.block.group(self.first_unit), groups * self.block.tile.warps_k, 0
        are_aligned = groups % together == 0 or together % groups == 0
        are_there = are_aligned and self.block.operands.groups == more * self._steps
        if Analyzer().can_prove(first % together == 0):
            first, apart = tirx.const(0, "int32"), first // together * each

        def further(step: Index) -> Index:
            return (first + step * more) // together * each

        return Pieces(size, per_stage // size, apart, further, are_there)

    def _channels(self, buffer: tirx.Buffer, pitch: int) -> Rows:
        """Tiles of channels."""
        block = self.block
        tiles = int64(block.operands.channel_tiles)
        return _rows(buffer, pitch, block.first_channel_tile, block.tile.channel_tiles, tiles)

    def _tokens(self, buffer: tirx.Buffer, pitch: int, count: int, terms: int = 1) -> Rows:
        block = self.block
        return _rows(buffer, pitch, block.first_row * terms, count, block.operands.rows * terms)

    def _following(self, rows: Rows, size: int, first: tirx.Expr, per_stage: int) -> Pieces:
        """Bytes behind those of the stage before, by the slices of the warps along k."""
        together = per_stage * self.block.tile.warps_k
        return Pieces(
            size,
            per_stage // size,
            first,
            lambda step: step * together,
            rows.pitch == together * self._steps,
        )

    def _stream(
        self, rows: Rows, pieces: Pieces, place: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
    ) -> Stream:
        """Threads side by side have pieces side by side, and rows are few for a thread: a copy
        takes a small constant in its address for free.
        """
        sharing = self.block.tile.warps_n * self.block.tile.warps_m
        threads = sharing * LANES
        across = min(pieces.per_row, max(_CONTIGUOUS, threads // rows.count))
        while pieces.per_row % across or threads % across:
            across -= 1
        thread = self.block.warp % sharing * LANES + self.block.lane
        row, piece = thread // across, thread % across
        first = pieces.first + piece * pieces.size
        start = T.address_of(rows.buffer[tuple(int64(0) for _ in rows.buffer.shape)])
        behind = (rows.first + int64_of(row)) * rows.pitch + int64_of(first)
        address = T.Bind(T.handle_add_byte_offset(start, behind))
        left = rows.pitch - first
        return Stream(rows, pieces, place, address, left, row, piece, threads // across, across)


def _rows(buffer: tirx.Buffer, pitch: int, first: tirx.Expr, count: int, there: tirx.Expr) -> Rows:
    """`there` are the rows of the whole operand."""
    if isinstance(there, tirx.IntImm) and there.value % count == 0:
        return Rows(buffer, pitch, first, count, None)
    left = int32_variable(tirx.min(there - first, int64(count)))
    return Rows(buffer, pitch, first, count, left)
