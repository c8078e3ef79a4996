"""What one thread block of the CUDA attention kernel works on, and where it keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import CHUNK, allocate_shared, copy_chunk, local
from ..emit import ceildiv, int64, when
from .cuda_tiling import ROWS, Tiling
from .spec import AttentionSpec

WARPS, LANES = ROWS // 16, 32
_THREADS = WARPS * LANES

_UNROLLED = 8


@dataclass(frozen=True)
class Block:
    """64 rows of one key/value head: row r is query r // group of the group's head r % group.

    So a group's heads share what is loaded, in a decode step, too, where there is one query.
    """

    tiling: Tiling
    batch: tirx.Expr
    kv_head: tirx.Expr
    first_row: tirx.Expr
    num_rows: tirx.Expr
    num_keys: tirx.Expr
    warp: tirx.Var
    lane: tirx.Var
    shared: tirx.Expr

    @property
    def spec(self) -> AttentionSpec:
        return self.tiling.spec

    @property
    def first_query(self) -> tirx.Expr:
        return self.first_row // self.spec.group

    @property
    def last_query(self) -> tirx.Expr:
        return tirx.min(self.first_row + (ROWS - 1), self.num_rows - 1) // self.spec.group

    def row(self, half: tirx.Expr | int) -> tirx.Expr:
        """The row of this lane's results: of the upper (0) or lower (1) eight of its warp."""
        return self.first_row + T.Cast("int64", self.warp * 16 + self.lane // 4 + half * 8)

    def head_and_query(self, row: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        group = self.spec.group
        return self.kv_head * group + row % group, row // group

    def key_tiles(self) -> tuple[tirx.Expr, tirx.Expr]:
        """The first tile with a key that some row may see, and the one behind the last."""
        spec, start, stop = self.spec, int64(0), self.num_keys
        if spec.first_visible is not None:
            start = tirx.max(self.first_query + spec.first_visible, start)
        if spec.last_visible is not None:
            stop = tirx.max(tirx.min(self.last_query + spec.last_visible + 1, stop), int64(0))
        if spec.empty_row == "uniform":
            every = self._every_row_sees_a_key()
            start, stop = T.Select(every, start, int64(0)), T.Select(every, stop, self.num_keys)
        return start // self.tiling.keys, ceildiv(stop, self.tiling.keys)

    def _every_row_sees_a_key(self) -> tirx.Expr:
        """By causal mask and window alone; a bias may hide any key."""
        spec = self.spec
        if spec.bias is not None:
            return tirx.const(False, "bool")
        every = self.num_keys > 0
        if spec.last_visible is not None:
            every = tirx.all(every, self.first_query + spec.last_visible >= 0)
        if spec.first_visible is not None:
            every = tirx.all(every, self.last_query + spec.first_visible < self.num_keys)
        return every

    def sees_all(self, first_key: tirx.Expr) -> tirx.Expr:
        """Whether every row sees every key of the tile, a bias aside."""
        spec, stop = self.spec, first_key + self.tiling.keys
        every = stop <= self.num_keys
        if spec.last_visible is not None:
            every = tirx.all(every, stop - 1 <= self.first_query + spec.last_visible)
        if spec.first_visible is not None:
            every = tirx.all(every, first_key >= self.last_query + spec.first_visible)
        return every

    def load_queries(self) -> None:
        """Start to copy the rows of `q` to shared memory, zeros for those behind the last."""

        def source(row: tirx.Expr) -> tuple[list[tirx.Expr], tirx.Expr]:
            head, query = self.head_and_query(self.first_row + row)
            return [self.batch, head, query], self.first_row + row < self.num_rows

        self._copy(self.spec.q, source, ROWS, self.tiling.width, 0)

    def load_keys(self, first_key: tirx.Expr) -> None:
        tiling, source = self.tiling, self._keys(first_key)
        self._copy(self.spec.k, source, tiling.keys, tiling.width, tiling.first_key)

    def load_values(self, first_key: tirx.Expr) -> None:
        tiling, source = self.tiling, self._keys(first_key)
        self._copy(self.spec.v, source, tiling.keys, tiling.value_width, tiling.first_value)

    def _keys(self, first_key: tirx.Expr) -> Callable:
        def source(row: tirx.Expr) -> tuple[list[tirx.Expr], tirx.Expr]:
            key = first_key + row
            return [self.batch, self.kv_head, key], key < self.num_keys

        return source

    def _copy(
        self, tensor: tirx.Buffer, source: Callable, rows: int, filled: int, start: int
    ) -> None:
        """In the widest pieces that rows of the tensor consist of; zeros up to the width `filled`.

        Many pieces are copied in a loop: unrolled, each keeps its address in registers.
        """
        width, size, padding = int(tensor.shape[3]), self.tiling.bytes, self.tiling.padding
        piece = math.gcd(width, CHUNK // size)
        per_row, thread = filled // piece, self.warp * LANES + self.lane
        pieces = rows * per_row
        steps = -(-pieces // _THREADS)
        with T.unroll(steps) if steps <= _UNROLLED else T.serial(steps) as step:
            at = step * _THREADS + thread
            with when(pieces % _THREADS == 0 or at < pieces):
                row, column = at // per_row, at % per_row * piece
                where, is_there = source(T.Cast("int64", row))
                if filled > width:
                    is_there = tirx.all(is_there, column < width)
                address = T.address_of(tensor[(*where, T.Cast("int64", column))])
                to = (row * (filled + padding) + (column + start)) * size
                copy_chunk(self.shared, to, address, is_there, piece * size)


@contextmanager
def launch(spec: AttentionSpec) -> Iterator[Block]:
    """The grid, all along x, which has the highest limit: (rows, batch, key/value head).

    Rows with most keys come first.
    """
    tiling, kv_heads = Tiling(spec), tirx.const(spec.num_kv_heads, "uint32")
    with (
        T.launch_thread("blockIdx.x", tiling.blocks) as x,
        T.launch_thread("threadIdx.y", WARPS) as warp,
        T.launch_thread("threadIdx.x", LANES) as lane,
    ):
        rows, head = _place(x, tiling)
        batch = T.Cast("int64", head // kv_heads)
        exists = batch < spec.batch  # the grid has a block even where there is no batch
        yield Block(
            tiling=tiling,
            batch=batch,
            kv_head=T.Cast("int64", head % kv_heads),
            first_row=T.Cast("int64", rows) * ROWS,
            num_rows=T.Select(exists, tiling.num_rows, int64(0)),
            num_keys=T.Select(exists, spec.num_keys, int64(0)),
            warp=warp,
            lane=lane,
            shared=allocate_shared(tiling.elements * tiling.bytes, "attention_tiles"),
        )


def _place(x: tirx.Var, tiling: Tiling) -> tuple[tirx.Expr, tirx.Expr]:
    """Which 64 rows and which head of all batches a block has, as uint32.

    A division of 64 bits would be a call. In registers, else TVM repeats it wherever it is used.
    """
    number, heads, row_blocks = (
        T.Cast("uint32", value) for value in (x, tiling.heads, tiling.row_blocks)
    )
    place = local(2, "uint32")
    T.buffer_store(place, row_blocks - tirx.const(1, "uint32") - number // heads, [0])
    T.buffer_store(place, number % heads, [1])
    return place[0], place[1]
