"""Fused attention for many query rows: the lanes of a vector are query rows.

Scores and outputs lie transposed, rows along the lanes: the softmax then needs no sum across
lanes, keys and values are read as they lie in memory, one number for all rows, and no head
dimension has a remainder. Loop nest::

    for task in parallel(B * G * blocks of rows):
        q = scale * q, transposed to [D, rows]
        for keys in tiles that some row of the block sees:
            attention_cpu_tile
        out = output / sum, transposed back
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import split
from ..emit import LANES, ceildiv, int64, parallel, scratch, serial, vectorized
from .cpu_scores import Rows, float32, inverse, is_uniform, opaque
from .cpu_tile import KeyTile, RowTile
from .spec import AttentionSpec


def attention_by_rows(spec: AttentionSpec, tile: RowTile) -> None:
    """Emit the kernel for any number of rows."""
    rows = spec.num_queries * spec.group
    blocks = ceildiv(rows, tile.rows)
    with parallel(spec.batch * spec.num_kv_heads * blocks) as task:
        outer, number = split(task, blocks)
        first = opaque(_alternating(number, blocks) * tile.rows)
        last = tirx.min(first + tile.rows, rows) - 1
        block = Rows.make(spec, *split(outer, int64(spec.num_kv_heads)), first, last)
        state = KeyTile(block, tile)
        _load_queries(block, state)
        start, stop = block.visible_keys()
        with serial(ceildiv(stop - start, tile.keys)) as step:
            first = opaque(start + step * tile.keys)
            state.emit(first, opaque(tirx.min(stop - first, int64(tile.keys))))
        _store(block, state)


def _alternating(number: tirx.Expr, count: tirx.Expr) -> tirx.Expr:
    """0, count - 1, 1, …: with a causal mask every run of tasks then has its share of the work."""
    half = tirx.truncdiv(number, int64(2))
    is_even = tirx.truncmod(number, int64(2)) == 0
    return tirx.Select(is_even, half, count - 1 - half)


def _load_queries(rows: Rows, state: KeyTile) -> None:
    """Transposed and scaled; rows beyond the last repeat it."""
    spec = rows.spec
    with serial(state.tile.rows) as row:
        query, head = rows.query_and_head(row)
        with serial(spec.head_dim) as d:
            value = spec.q[rows.batch, head, query, d].astype("float32")
            T.buffer_store(state.queries, value * float32(spec.scale), [d, row])
        relative = (query - rows.first_query).astype("int32")
        T.buffer_store(state.query_of, relative, [row])


def _store(rows: Rows, state: KeyTile) -> None:
    spec, factors = rows.spec, scratch(state.tile.rows)
    uniform = scratch(state.tile.rows) if spec.empty_row == "uniform" else None
    for v, (maximum, total) in enumerate(zip(state.maximum, state.total, strict=True)):
        with vectorized() as lane:
            T.buffer_store(factors, inverse(spec, total[lane]), [v * LANES + lane])
        if uniform is not None:
            with vectorized() as lane:
                is_empty = is_uniform(maximum[lane], total[lane]).astype("float32")
                T.buffer_store(uniform, is_empty, [v * LANES + lane])
    with serial(rows.last - rows.first + 1) as row:
        query, head = rows.query_and_head(row)
        with serial(spec.value_dim) as d:
            value = (state.output[d, row] * factors[row]).astype(spec.dtype)
            T.buffer_store(spec.out, value, [rows.batch, head, query, d])
        if uniform is not None:
            with T.If(uniform[row] > float32(0.0)), T.Then():
                rows.store_mean(query, head)
