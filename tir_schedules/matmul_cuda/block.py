"""What a block of a CUDA INT4 product works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import allocate_shared
from ..emit import ceildiv, int64
from .operands import Operands
from .tile import LANES, UNIT, Stage, Tile


@dataclass(frozen=True)
class Block:
    """The tile of a block, and the place of this thread in it."""

    operands: Operands
    tile: Tile
    stage: Stage
    first_channel_tile: tirx.Expr
    first_row: tirx.Expr
    part: tirx.Expr
    warp: tirx.Var
    lane: tirx.Var
    shared: tirx.Expr

    @property
    def thread(self) -> tirx.Expr:
        return self.warp * LANES + self.lane

    @property
    def warp_n(self) -> tirx.Expr:
        return self.warp // self.tile.warps_m % self.tile.warps_n

    @property
    def warp_m(self) -> tirx.Expr:
        return self.warp % self.tile.warps_m

    @property
    def warp_k(self) -> tirx.Expr:
        if self.tile.warps_k == 1:
            return tirx.const(0, "int32")
        return self.warp // (self.tile.warps_m * self.tile.warps_n)

    def group(self, unit: tirx.Expr) -> tirx.Expr:
        """That a unit starts with; 0 where each channel is one."""
        if not self.operands.is_grouped:
            return tirx.const(0, "int32")
        group_size = self.operands.weight.group_size
        if group_size >= UNIT:
            return unit // (group_size // UNIT)
        return unit * (UNIT // group_size)

    def channel_pair(self, channel_tile: tirx.Expr, half: int) -> tuple[tirx.Expr, ...]:
        """Where the scale of one of this lane's channels lies, if each is one group."""
        return self.channel(channel_tile), int64(0), int64_of(self.lane // 4 * 2 + half)

    def channel(self, channel_tile: tirx.Expr) -> tirx.Expr:
        """Of all, the tile of channels that is one of this block's.

        The last one instead of those behind it, whose results are dropped.
        """
        tiles = self.operands.channel_tiles
        here = self.first_channel_tile + int64_of(channel_tile)
        return here if tiles % self.tile.channel_tiles == 0 else tirx.min(here, int64(tiles - 1))


def int64_of(value: tirx.Expr | int) -> tirx.Expr:
    return int64(value) if isinstance(value, int) else T.Cast("int64", value)


def row_and_block(x: tirx.Expr, across: int) -> tuple[tirx.Expr, tirx.Expr]:
    """Of block `x`, where a row has `across` blocks, the row and the number of the block in it.

    A division of 64 bits would be a call. Without a division there is no cast, of which TVM takes
    the bound to be 2³² without rows, and a workspace to be as large.
    """
    if across == 1:
        return int64_of(x), tirx.const(0, "int32")
    number = T.Cast("uint32", x)
    return T.Cast("int64", number // across), T.Cast("int32", number % across)


@contextmanager
def launch(operands: Operands, tile: Tile) -> Iterator[Block]:
    """The grid: along x (tokens, channels), along y the parts along k."""
    stage = operands.stage(tile)
    across = -(-operands.channel_tiles // tile.channel_tiles)
    down = ceildiv(operands.rows, tile.block_tokens)
    with (
        T.launch_thread("blockIdx.x", down * across) as x,
        T.launch_thread("blockIdx.y", tile.split) as part,
        T.launch_thread("threadIdx.y", tile.warps) as warp,
        T.launch_thread("threadIdx.x", LANES) as lane,
    ):
        number = T.Cast("uint32", x)
        channel, row = number % across, number // across
        yield Block(
            operands=operands,
            tile=tile,
            stage=stage,
            first_channel_tile=T.Cast("int64", channel) * tile.channel_tiles,
            first_row=T.Cast("int64", row) * tile.block_tokens,
            part=T.Cast("int32", part),
            warp=warp,
            lane=lane,
            shared=allocate_shared(stage.shared_bytes, "matmul_tiles", stage.alignment),
        )
