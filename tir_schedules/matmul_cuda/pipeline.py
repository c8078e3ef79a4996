"""The walk of a block along k: the next stages of shared memory fill while one is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import commit_copies, local, synchronize, synchronize_warp, wait_for_own_copies
from ..cuda_wgmma import publish_copies
from ..emit import when
from .block import Block
from .copies import Copies
from .tile import Stage

Visit: TypeAlias = Callable[[tirx.Expr, tirx.Expr], None]


def for_each_stage(block: Block, visit: Visit) -> None:
    """`visit` each stage: the first unit of this warp's slice, and where the slice lies."""
    tile, stage, operands = block.tile, block.stage, block.operands
    ahead, steps = tile.stages - 1, operands.steps_of_part(tile)
    first, count = 0, steps
    if tile.split > 1:
        first = block.part * steps
        count = tirx.min(operands.steps(tile) - first, steps)
    streams = Copies(block, _unit(block, first)).streams()

    def start(step: tirx.Expr | int, slot: tirx.Expr) -> None:
        for stream in streams:
            stream.start(step, slot)

    own = block.shared + T.Cast("uint32", block.warp_k * stage.slice)
    with T.unroll(ahead) as step:
        with when((tile.split == 1 and ahead <= steps) or step < count):
            start(step, own + T.Cast("uint32", step * stage.bytes))
        commit_copies()
    slots = local(2, "uint32")  # the stage that is multiplied next, and the last one
    T.buffer_store(slots, tirx.const(0, "uint32"), [0])
    T.buffer_store(slots, tirx.const(ahead * stage.bytes, "uint32"), [1])
    with T.serial(0, count) as step:
        wait_for_own_copies(pending=ahead - 1)
        if tile.wgmma:
            publish_copies()
        _meet(block)
        with when(step + ahead < count):
            start(step + ahead, own + slots[1])
        commit_copies()
        _advance(slots, stage)
        visit(_unit(block, first + step), own + slots[1])


def _unit(block: Block, step: tirx.Expr | int) -> tirx.Expr:
    """The first that this warp takes in a stage."""
    return step * block.tile.step_units + block.warp_k * block.tile.units


def _meet(block: Block) -> None:
    """Wait for the warps that share this slice: what one copied, all read."""
    if block.tile.warps_n * block.tile.warps_m == 1:
        synchronize_warp()
    else:
        synchronize()


def _advance(slots: tirx.Buffer, stage: Stage) -> None:
    size, last = stage.bytes, stage.pipeline_bytes - stage.bytes
    T.buffer_store(slots, slots[0], [1])
    is_last = slots[1] == tirx.const(last, "uint32")
    following = slots[1] + tirx.const(size, "uint32")
    T.buffer_store(slots, T.Select(is_last, tirx.const(0, "uint32"), following), [0])
