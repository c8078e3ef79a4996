"""The end of a CUDA INT4 product: sums of warps and blocks along k, and the epilogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from ..contraction import Contraction, unflatten
from ..cuda_ptx import load_shared, local, store_shared, synchronize, wait_for_copies
from ..emit import int64, when
from .block import Block, int64_of, row_and_block
from .tile import CHANNELS, TOKENS

_VECTOR = 4
"""Output channels that a thread finishes side by side."""

_THREADS = 128


def add_up_block(
    product: Contraction, block: Block, sums: tirx.Buffer, partial: tirx.Buffer | None
) -> None:
    """Add up what the warps along k have, in their order, by way of shared memory.

    To `partial` (split, m, n) if there are several blocks along k, else to the epilogue. Those of
    one warp go to `partial` as they are, eight channels, a sector of 32 bytes, at a time.
    """
    if partial is not None and block.tile.warps_k == 1:
        _store_sums(block, sums, partial)
        return
    wait_for_copies()  # none is under way; and no warp reads operands any more
    _write_sums(block, sums)
    synchronize()
    stage, tile = block.stage, block.tile
    across = tile.block_channels // _VECTOR
    count = stage.tokens * across
    with T.serial(0, -(-count // tile.threads)) as step:
        number = step * tile.threads + block.thread
        token, channel = number // across, number % across * _VECTOR
        row = block.first_row + int64_of(token)
        column = block.first_channel_tile * CHANNELS + int64_of(channel)
        inside = [row < block.operands.rows]
        if count % tile.threads:
            inside.append(number < count)
        if block.operands.n % tile.block_channels:
            inside.append(column < block.operands.n)
        with when(tirx.all(*inside)):
            totals = _totals(block, token, channel)
            if partial is None:
                finish(product, row, column, totals)
            else:
                _store_vector(partial, [int64_of(block.part), row, column], totals)


def _write_sums(block: Block, sums: tirx.Buffer) -> None:
    stage, tile = block.stage, block.tile
    for row, values in _rows_of_lane(block, sums):
        with when(stage.tokens >= tile.block_tokens or row < stage.tokens):
            for channel, value in values:
                at = (block.warp_k * stage.tokens + row) * stage.sum_pitch + channel
                store_shared(block.shared, at * 4, value)


def _store_sums(block: Block, sums: tirx.Buffer, partial: tirx.Buffer) -> None:
    columns, rows = int(partial.shape[2]), block.operands.rows
    first = block.first_channel_tile * CHANNELS
    for row, values in _rows_of_lane(block, sums):
        here = block.first_row + int64_of(row)
        with when(here < rows):
            for channel, value in values:
                column = first + int64_of(channel)
                with when(columns % block.tile.block_channels == 0 or column < columns):
                    T.buffer_store(partial, value, [int64_of(block.part), here, column])


def _rows_of_lane(
    block: Block, sums: tirx.Buffer
) -> Iterator[tuple[tirx.Expr, list[tuple[tirx.Expr, tirx.Expr]]]]:
    """Tokens of the block of which this lane has sums, and those by channel of the block."""
    tile, lane = block.tile, block.lane
    for token in range(tile.tokens):
        for e in range(2):
            values = []
            for channel in range(tile.channels):
                first = (block.warp_n * tile.channels + channel) * CHANNELS + lane // 4
                at = (channel * tile.tokens + token) * 4 + e
                values += [(first + 8 * u, sums[at + 2 * u]) for u in range(2)]
            yield (block.warp_m * tile.tokens + token) * TOKENS + lane % 4 * 2 + e, values


def _totals(block: Block, token: tirx.Expr, channel: tirx.Expr) -> tirx.Buffer:
    stage, values, totals = block.stage, local(_VECTOR), local(_VECTOR)
    for part in range(block.tile.warps_k):
        at = (part * stage.tokens + token) * stage.sum_pitch + channel
        load_shared(values if part else totals, 0, block.shared, at * 4, _VECTOR)
        if part:
            _add(totals, values)
    return totals


def _add(totals: tirx.Buffer, values: tirx.Buffer) -> None:
    for i in range(_VECTOR):
        T.buffer_store(totals, totals[i] + values[i], [i])


def _store_vector(partial: tirx.Buffer, at: Sequence[tirx.Expr], values: tirx.Buffer) -> None:
    """Columns of `partial` are padded to whole vectors."""
    *outer, column = at
    with T.vectorized(0, _VECTOR) as lane:
        T.buffer_store(partial, values[lane], [*outer, column + int64_of(lane)])


def partial_sums(split: int, rows: tirx.Expr, n: int) -> tirx.Buffer:
    """What blocks along k leave to `add_up_parts`, in global memory."""
    columns = -(-n // _VECTOR) * _VECTOR
    shape = int64(split), rows, int64(columns)
    return IRBuilder.name("partial", T.alloc_buffer(shape, "float32", scope="global"))


def add_up_parts(product: Contraction, rows: tirx.Expr, partial: tirx.Buffer) -> None:
    """A kernel that adds up the parts along k, in their order, and runs the epilogue."""
    vectors = int(partial.shape[2]) // _VECTOR
    across = -(-vectors // _THREADS)
    with (
        T.launch_thread("blockIdx.x", rows * across) as x,
        T.launch_thread("threadIdx.x", _THREADS) as thread,
    ):
        row, block = row_and_block(x, across)
        vector = block * _THREADS + thread
        column = int64_of(vector * _VECTOR)
        with when(vectors % _THREADS == 0 or vector < vectors):
            totals, values = local(_VECTOR), local(_VECTOR)
            for part in range(int(partial.shape[0])):
                with T.vectorized(0, _VECTOR) as lane:
                    value = partial[int64(part), row, column + int64_of(lane)]
                    T.buffer_store(values if part else totals, value, [lane])
                if part:
                    _add(totals, values)
            finish(product, row, column, totals)


def finish(product: Contraction, row: tirx.Expr, column: tirx.Expr, totals: tirx.Buffer) -> None:
    """Send sums of columns side by side through the epilogue; those behind the last are dropped."""
    kept = {buffer: local(_VECTOR, str(buffer.dtype)) for buffer in product.intermediates}
    rows, columns = _axes(product, row), int(product.column.dom.extent)

    def one(lane: tirx.Expr | int) -> None:
        def keep(buffer: tirx.Buffer, value: tirx.Expr) -> tirx.Expr:
            T.buffer_store(kept[buffer], value, [lane])
            return kept[buffer][lane]

        at = {**rows, product.column.var: column + int64_of(lane)}
        product.finish(at, totals[lane], keep, T.buffer_store)

    if columns % _VECTOR == 0:
        with T.vectorized(0, _VECTOR) as lane:
            one(lane)
        return
    for lane in range(_VECTOR):
        with when(column + lane < columns):
            one(lane)


def _axes(product: Contraction, row: tirx.Expr) -> dict[tirx.Var, tirx.Expr]:
    """The value of each axis of rows. A division of 64 bits would be a call."""
    iters = product.rows.iters
    if len(iters) < 2:
        return product.rows.at(row)
    extents = [T.Cast("uint32", axis.dom.extent) for axis in iters]
    indices = unflatten(T.Cast("uint32", row), extents)
    return {axis.var: T.Cast("int64", at) for axis, at in zip(iters, indices, strict=True)}
