"""What one thread block of the CUDA attention kernel works on, and where it keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from .attention_cuda_ptx import CHUNK, allocate_shared, copy_chunk
from .attention_spec import AttentionSpec
from .emit import ceildiv, int64, when

ROWS = 64
"""Rows of a block, 16 for each warp."""

WARPS, LANES = ROWS // 16, 32
_THREADS = WARPS * LANES


@dataclass(frozen=True)
class Tiling:
    """Sizes in elements. Rows in shared memory are 8 apart from a multiple of 16, so that the rows
    of a matrix lie in different banks.
    """

    spec: AttentionSpec

    @property
    def keys(self) -> int:
        """Keys of a tile: scores of 16 rows, and their results, stay in registers."""
        return 64 if max(self.spec.head_dim, self.spec.value_dim) <= 128 else 32

    @property
    def holds_queries(self) -> bool:
        """Whether the queries, too, stay in registers."""
        return self.spec.head_dim <= 128

    @property
    def pitch(self) -> int:
        """Of queries and keys."""
        return self.spec.head_dim + CHUNK

    @property
    def value_pitch(self) -> int:
        return self.spec.value_dim + CHUNK

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

        self._copy(self.spec.q, source, ROWS, 0)

    def load_keys(self, first_key: tirx.Expr) -> None:
        self._copy(self.spec.k, self._keys(first_key), self.tiling.keys, self.tiling.first_key)

    def load_values(self, first_key: tirx.Expr) -> None:
        self._copy(self.spec.v, self._keys(first_key), self.tiling.keys, self.tiling.first_value)

    def _keys(self, first_key: tirx.Expr) -> Callable:
        def source(row: tirx.Expr) -> tuple[list[tirx.Expr], tirx.Expr]:
            key = first_key + row
            return [self.batch, self.kv_head, key], key < self.num_keys

        return source

    def _copy(self, tensor: tirx.Buffer, source: Callable, rows: int, start: int) -> None:
        width = int(tensor.shape[3])
        per_row, thread = width // CHUNK, self.warp * LANES + self.lane
        chunks = rows * per_row
        with T.unroll(-(-chunks // _THREADS)) as step:
            chunk = step * _THREADS + thread
            with when(chunks % _THREADS == 0 or chunk < chunks):
                row, column = chunk // per_row, chunk % per_row * CHUNK
                where, is_there = source(T.Cast("int64", row))
                address = T.address_of(tensor[(*where, T.Cast("int64", column))])
                at = row * (width + CHUNK) + (column + start)
                copy_chunk(self.shared, at, address, is_there)


@contextmanager
def launch(spec: AttentionSpec) -> Iterator[Block]:
    """The grid: (batch, key/value head) along x, rows along y, those with most keys first."""
    tiling, one = Tiling(spec), int64(1)
    heads, num_rows = spec.num_kv_heads, spec.num_queries * spec.group
    row_blocks = tirx.max(ceildiv(num_rows, ROWS), one)
    with (
        T.launch_thread("blockIdx.y", row_blocks) as y,
        T.launch_thread("blockIdx.x", tirx.max(spec.batch * heads, one)) as x,
        T.launch_thread("threadIdx.y", WARPS) as warp,
        T.launch_thread("threadIdx.x", LANES) as lane,
    ):
        batch = x // heads
        exists = batch < spec.batch  # the grid has a block even where there is no batch
        yield Block(
            tiling=tiling,
            batch=batch,
            kv_head=x % heads,
            first_row=(row_blocks - 1 - y) * ROWS,
            num_rows=T.Select(exists, num_rows, int64(0)),
            num_keys=T.Select(exists, spec.num_keys, int64(0)),
            warp=warp,
            lane=lane,
            shared=allocate_shared(tiling.elements),
        )
