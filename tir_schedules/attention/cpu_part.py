"""Few rows meet a part of the keys: the lanes are head dimensions, or keys. See
`cpu_decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cpu.vector_math import exp_nonpositive
from ..emit import LANES, ceildiv, int64, registers, scratch, serial, vectorized
from .cpu_lanes import along, each_vector, folded, set_lanes
from .cpu_scores import (
    HIDDEN,
    Rows,
    capped,
    finite,
    float32,
    is_mask,
    opaque,
    with_bias,
)
from .spec import AttentionSpec

Starts: TypeAlias = Sequence[tirx.Expr]
"""First dimensions of the vectors of a row."""

Sums: TypeAlias = Sequence[Sequence[tirx.Buffer]]
"""Vectors of each row."""


@dataclass(frozen=True)
class DecodeTile:
    """Rows, accumulators of 16 lanes side by side, keys in a tile, and parts of a head's keys."""

    rows: int
    registers: int
    keys: int
    parts: int

    @property
    def per_row(self) -> int:
        return max(1, self.registers // self.rows)


class Partial:
    """What each part leaves behind: its maximum, its sum, and its output under that maximum."""

    def __init__(self, spec: AttentionSpec, tile: DecodeTile) -> None:
        parts = spec.batch * spec.num_kv_heads * tile.parts
        self.maximum = scratch(parts, tile.rows)
        self.total = scratch(parts, tile.rows)
        self.output = scratch(parts, tile.rows, spec.value_dim)


class KeyPart:
    """A part of the keys of one head."""

    def __init__(self, rows: Rows, tile: DecodeTile, partial: Partial, task: tirx.Expr) -> None:
        self.rows, self.spec, self.tile = rows, rows.spec, tile
        self.partial, self.task = partial, task
        self.queries = scratch(tile.rows, self.spec.head_dim)
        self.scores = scratch(tile.rows, tile.keys)
        self.correction = scratch(tile.rows)

    def emit(self, part: tirx.Expr) -> None:
        self._begin()
        keys = self.tile.keys
        start, stop = self.rows.visible_keys()
        share = ceildiv(ceildiv(stop - start, keys), self.tile.parts) * keys
        start = opaque(start + part * share)
        stop = opaque(tirx.min(start + share, stop))
        with serial(ceildiv(tirx.max(stop - start, int64(0)), keys)) as step:
            first = opaque(start + step * keys)
            count = opaque(tirx.min(stop - first, int64(keys)))
            self._products(first, count)
            self._finish_scores(first, count)
            with serial(self.tile.rows) as row:
                self._softmax(row, count)
            self._accumulate(first, count)

    def _begin(self) -> None:
        with serial(self.tile.rows) as row:
            query, head = self.rows.query_and_head(row)
            with serial(self.spec.head_dim) as d:
                value = self.spec.q[self.rows.batch, head, query, d].astype("float32")
                T.buffer_store(self.queries, value * float32(self.spec.scale), [row, d])
            T.buffer_store(self.partial.maximum, float32(HIDDEN), [self.task, row])
            T.buffer_store(self.partial.total, float32(0.0), [self.task, row])
            with serial(self.spec.value_dim) as d:
                T.buffer_store(self.partial.output, float32(0.0), [self.task, row, d])

    def _products(self, first: tirx.Expr, count: tirx.Expr) -> None:
        """scores = q . k; keys beyond `count` repeat the last one."""
        spec, side = self.spec, self.tile.per_row
        batch, head = self.rows.batch, self.rows.head
        with serial(ceildiv(count, side)) as step:
            at = [opaque(tirx.min(step * side + i, count - 1)) for i in range(side)]
            sums = [registers(self.tile.rows) for _ in at]
            for first_d, lanes in along(spec.head_dim, 1):
                for key, accumulators in zip(at, sums, strict=True):
                    for row, acc in enumerate(accumulators):
                        with vectorized(lanes) as lane:
                            d = first_d + lane
                            x = spec.k[batch, head, first + key, d].astype("float32")
                            value = acc[lane] + x * self.queries[row, d]
                            T.buffer_store(acc, value, [lane])
            for key, accumulators in zip(at, sums, strict=True):
                for row, acc in enumerate(accumulators):
                    T.buffer_store(self.scores, folded(acc, add), [int64(row), key])

    def _finish_scores(self, first: tirx.Expr, count: tirx.Expr) -> None:
        softcap, scores = self.spec.softcap, self.scores
        if softcap:
            with serial(self.tile.rows) as row, each_vector(self.tile.keys) as key:
                T.buffer_store(scores, capped(scores[row, key], softcap), [row, key])
        if self.spec.bias is not None:
            with serial(self.tile.rows) as row:
                query, head = self.rows.query_and_head(row)
                with serial(count) as key:
                    bias = T.Bind(self.rows.bias(query, head, first + key))
                    T.buffer_store(scores, with_bias(self.spec, scores[row, key], bias), [row, key])
        self.rows.by_visibility(first, first + count - 1, lambda masked: (
            self._hide(first, count) if masked else None
        ))  # fmt: skip

    def _hide(self, first: tirx.Expr, count: tirx.Expr) -> None:
        with serial(self.tile.rows) as row:
            query, _ = self.rows.query_and_head(row)
            with serial(count) as key, T.If(self.rows.hides(query, first + key)), T.Then():
                T.buffer_store(self.scores, float32(HIDDEN), [row, key])

    def _softmax(self, row: tirx.Expr, count: tirx.Expr) -> None:
        """As in `cpu_tile`; lanes beyond `count` hold hidden keys."""
        lanes, where = registers(1)[0], [self.task, row]
        set_lanes(lanes, lambda _lane: float32(HIDDEN))
        with each_vector(self.tile.keys) as key:
            score = tirx.Select(key < count, self.scores[row, key], float32(HIDDEN))
            T.buffer_store(self.scores, score, [row, key])
        with serial(self.tile.keys // LANES) as block:
            set_lanes(
                lanes, lambda lane: tirx.max(lanes[lane], self.scores[row, block * LANES + lane])
            )
        before = opaque(self.partial.maximum[self.task, row])
        after = opaque(tirx.max(before, folded(lanes, tirx.max)))
        shift = opaque(finite(after))
        correction = opaque(exp_nonpositive(before - shift))
        set_lanes(lanes, lambda _lane: float32(0.0))
        with each_vector(self.tile.keys) as key:
            weight = exp_nonpositive(self.scores[row, key] - shift)
            T.buffer_store(self.scores, weight, [row, key])
        with serial(self.tile.keys // LANES) as block:
            set_lanes(lanes, lambda lane: lanes[lane] + self.scores[row, block * LANES + lane])
        total = self.partial.total[self.task, row] * correction + folded(lanes, add)
        T.buffer_store(self.partial.maximum, after, where)
        T.buffer_store(self.partial.total, total, where)
        T.buffer_store(self.correction, correction, [row])

    def _accumulate(self, first: tirx.Expr, count: tirx.Expr) -> None:
        """output = output * correction + scores v, by `per_row` vectors of Dv."""
        spec, output = self.spec, self.partial.output
        for first_d, lanes in along(spec.value_dim, self.tile.per_row):
            starts = [first_d + v * LANES for v in range(max(1, lanes // LANES))]
            width = min(lanes, LANES)
            sums = [[registers(1, width)[0] for _ in starts] for _ in range(self.tile.rows)]
            for row, accumulators in enumerate(sums):
                for d, acc in zip(starts, accumulators, strict=True):
                    with vectorized(width) as lane:
                        value = output[self.task, row, d + lane] * self.correction[row]
                        T.buffer_store(acc, value, [lane])

            def add(masked: bool, starts: Starts = starts, sums: Sums = sums) -> None:
                self._add_values(first, count, starts, sums, masked or is_mask(spec))

            self.rows.by_visibility(first, first + count - 1, add)
            for row, accumulators in enumerate(sums):
                for d, acc in zip(starts, accumulators, strict=True):
                    with vectorized(width) as lane:
                        T.buffer_store(output, acc[lane], [self.task, int64(row), d + lane])

    def _add_values(
        self, first: tirx.Expr, count: tirx.Expr, starts: Starts, sums: Sums, selects: bool
    ) -> None:
        """sums[row][v] += scores v; where `selects`, NaN or infinity times a weight of 0 is 0."""
        spec, batch, head = self.spec, self.rows.batch, self.rows.head
        with serial(count) as key:
            for row, accumulators in enumerate(sums):
                weight = T.Bind(self.scores[row, key])
                for d, acc in zip(starts, accumulators, strict=True):
                    with vectorized(int(acc.shape[0])) as lane:
                        x = spec.v[batch, head, first + key, d + lane].astype("float32")
                        value = acc[lane] + weight * x
                        if selects:
                            value = tirx.Select(weight != float32(0.0), value, acc[lane])
                        T.buffer_store(acc, value, [lane])
