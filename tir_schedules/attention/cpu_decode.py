"""Fused attention for the few rows of decoding: the lanes of a vector are head dimensions, or keys.

Memory sets the pace: keys and values are read once, by all query heads of their group together.
Where there are fewer key/value heads than cores, each head's keys are split into parts, which a
second loop joins ("flash decoding", Dao et al. 2023). Loop nest::

    for task in parallel(B * G * parts):
        for keys in tiles of the part:
            for some keys:    registers [keys, rows] of lanes along D = k q;  sum of the lanes
            cap, bias, mask;  scores = exp(scores - maximum);  lanes are keys
            for some of Dv:   registers [rows, vectors] = output * correction + scores v
    for head in parallel(B * G):
        out = output / sum, of all parts under one maximum
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import split
from ..cpu.vector_math import exp_nonpositive
from ..emit import int64, parallel, registers, scratch, serial
from .cpu_lanes import clear, set_lanes
from .cpu_part import DecodeTile, KeyPart, Partial
from .cpu_scores import HIDDEN, Rows, finite, float32, inverse, is_uniform, opaque
from .spec import AttentionSpec


def attention_of_few_rows(spec: AttentionSpec, tile: DecodeTile) -> None:
    """Emit the kernel for exactly ``tile.rows`` rows."""
    partial = Partial(spec, tile)
    heads = spec.batch * spec.num_kv_heads
    with parallel(heads * tile.parts) as task:
        outer, part = split(task, int64(tile.parts))
        rows = _rows(spec, tile, outer)
        KeyPart(rows, tile, partial, task).emit(opaque(part))
    with parallel(heads) as head:
        _join(_rows(spec, tile, head), tile, partial, head)


def _rows(spec: AttentionSpec, tile: DecodeTile, head: tirx.Expr) -> Rows:
    return Rows.make(spec, *split(head, int64(spec.num_kv_heads)), int64(0), int64(tile.rows - 1))


def _join(rows: Rows, tile: DecodeTile, partial: Partial, task: tirx.Expr) -> None:
    """Store the output of a head."""
    spec, first = rows.spec, task * tile.parts
    out, sums = scratch(spec.value_dim), registers(2, 1)
    largest, total = (buffer[int64(0)] for buffer in sums)
    with serial(tile.rows) as row:
        query, head = rows.query_and_head(row)
        set_lanes(sums[0], lambda _: float32(HIDDEN), 1)
        set_lanes(sums[1], lambda _: float32(0.0), 1)
        clear(out)
        with serial(tile.parts) as part:
            maximum = partial.maximum[first + part, row]
            set_lanes(sums[0], lambda _: tirx.max(largest, maximum), 1)
        with serial(tile.parts) as part:
            maximum = partial.maximum[first + part, row]
            weight = opaque(exp_nonpositive(maximum - finite(largest)))
            set_lanes(sums[1], lambda _: total + partial.total[first + part, row] * weight, 1)
            with serial(spec.value_dim) as d:
                value = out[d] + partial.output[first + part, row, d] * weight
                T.buffer_store(out, value, [d])
        factor = opaque(inverse(spec, total))
        with serial(spec.value_dim) as d:
            value = (out[d] * factor).astype(spec.dtype)
            T.buffer_store(spec.out, value, [rows.batch, head, query, d])
        if spec.empty_row == "uniform":
            with T.If(is_uniform(largest, total)), T.Then():
                rows.store_mean(query, head)
