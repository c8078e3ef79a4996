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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add

from tvm import tirx
from tvm.tirx.script import builder as T

from .attention_cpu_scores import (
    HIDDEN,
    Rows,
    capped,
    finite,
    float32,
    inverse,
    is_mask,
    is_uniform,
    opaque,
    with_bias,
)
from .attention_spec import AttentionSpec
from .contraction import split
from .emit import LANES, ceildiv, int64, parallel, registers, scratch, serial, vectorized
from .vector_math import exp_nonpositive


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


def attention_of_few_rows(spec: AttentionSpec, tile: DecodeTile) -> None:
    """Emit the kernel for exactly ``tile.rows`` rows."""
    partial = Partial(spec, tile)
    heads = spec.batch * spec.num_kv_heads
    with parallel(heads * tile.parts) as task:
        outer, part = split(task, int64(tile.parts))
        rows = _rows(spec, tile, outer)
        _Part(rows, tile, partial, task).emit(opaque(part))
    with parallel(heads) as head:
        _join(_rows(spec, tile, head), tile, partial, head)


def _rows(spec: AttentionSpec, tile: DecodeTile, head: tirx.Expr) -> Rows:
    return Rows.make(spec, *split(head, int64(spec.num_kv_heads)), int64(0), int64(tile.rows - 1))


class _Part:
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

            def emit(masked: bool) -> None:
                self._products(first, count)
                self._finish_scores(first, count, masked)
                with serial(self.tile.rows) as row:
                    self._softmax(row, count)
                self._accumulate(first, count, masked or is_mask(self.spec))

            self.rows.by_visibility(first, first + count - 1, emit)

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
            for first_d, lanes in _along(spec.head_dim, 1):
                for key, accumulators in zip(at, sums, strict=True):
                    for row, acc in enumerate(accumulators):
                        with vectorized(lanes) as lane:
                            d = first_d + lane
                            x = spec.k[batch, head, first + key, d].astype("float32")
                            value = acc[lane] + x * self.queries[row, d]
                            T.buffer_store(acc, value, [lane])
            for key, accumulators in zip(at, sums, strict=True):
                for row, acc in enumerate(accumulators):
                    T.buffer_store(self.scores, _folded(acc, add), [int64(row), key])

    def _finish_scores(self, first: tirx.Expr, count: tirx.Expr, masked: bool) -> None:
        spec = self.spec
        if spec.softcap:
            with serial(self.tile.rows) as row, _each_vector(self.tile.keys) as key:
                T.buffer_store(self.scores, capped(self.scores[row, key], spec.softcap), [row, key])
        if spec.bias is None and not masked:
            return
        with serial(self.tile.rows) as row:
            query, head = self.rows.query_and_head(row)
            with serial(count) as key:
                score = self.scores[row, key]
                if spec.bias is not None:
                    bias = T.Bind(self.rows.bias(query, head, first + key))
                    score = with_bias(spec, score, bias)
                if masked:
                    score = tirx.Select(self._hides(query, first + key), float32(HIDDEN), score)
                T.buffer_store(self.scores, score, [row, key])

    def _hides(self, query: tirx.Expr, key: tirx.Expr) -> tirx.Expr:
        upper, lower = self.spec.last_visible, self.spec.first_visible
        tests = [] if upper is None else [key > query + upper]
        tests += [] if lower is None else [key < query + lower]
        return tirx.any(*tests)

    def _softmax(self, row: tirx.Expr, count: tirx.Expr) -> None:
        """As in `attention_cpu_tile`; lanes beyond `count` hold hidden keys."""
        lanes, where = registers(1)[0], [self.task, row]
        _set(lanes, lambda _lane: float32(HIDDEN))
        with _each_vector(self.tile.keys) as key:
            score = tirx.Select(key < count, self.scores[row, key], float32(HIDDEN))
            T.buffer_store(self.scores, score, [row, key])
        with serial(self.tile.keys // LANES) as block:
            _set(lanes, lambda lane: tirx.max(lanes[lane], self.scores[row, block * LANES + lane]))
        before = opaque(self.partial.maximum[self.task, row])
        after = opaque(tirx.max(before, _folded(lanes, tirx.max)))
        shift = opaque(finite(after))
        correction = opaque(exp_nonpositive(before - shift))
        _set(lanes, lambda _lane: float32(0.0))
        with _each_vector(self.tile.keys) as key:
            weight = exp_nonpositive(self.scores[row, key] - shift)
            T.buffer_store(self.scores, weight, [row, key])
        with serial(self.tile.keys // LANES) as block:
            _set(lanes, lambda lane: lanes[lane] + self.scores[row, block * LANES + lane])
        total = self.partial.total[self.task, row] * correction + _folded(lanes, add)
        T.buffer_store(self.partial.maximum, after, where)
        T.buffer_store(self.partial.total, total, where)
        T.buffer_store(self.correction, correction, [row])

    def _accumulate(self, first: tirx.Expr, count: tirx.Expr, selects: bool) -> None:
        """output = output * correction + scores v, by `per_row` vectors of Dv."""
        spec, output = self.spec, self.partial.output
        batch, head = self.rows.batch, self.rows.head
        for first_d, lanes in _along(spec.value_dim, self.tile.per_row):
            starts = [first_d + v * LANES for v in range(max(1, lanes // LANES))]
            width = min(lanes, LANES)
            sums = [[registers(1, width)[0] for _ in starts] for _ in range(self.tile.rows)]
            for row, accumulators in enumerate(sums):
                for d, acc in zip(starts, accumulators, strict=True):
                    with vectorized(width) as lane:
                        value = output[self.task, row, d + lane] * self.correction[row]
                        T.buffer_store(acc, value, [lane])
            with serial(count) as key:
                for row, accumulators in enumerate(sums):
                    weight = T.Bind(self.scores[row, key])
                    for d, acc in zip(starts, accumulators, strict=True):
                        with vectorized(width) as lane:
                            x = spec.v[batch, head, first + key, d + lane].astype("float32")
                            value = acc[lane] + weight * x
                            if selects:
                                value = tirx.Select(weight != float32(0.0), value, acc[lane])
                            T.buffer_store(acc, value, [lane])
            for row, accumulators in enumerate(sums):
                for d, acc in zip(starts, accumulators, strict=True):
                    with vectorized(width) as lane:
                        T.buffer_store(output, acc[lane], [self.task, int64(row), d + lane])


def _join(rows: Rows, tile: DecodeTile, partial: Partial, task: tirx.Expr) -> None:
    """Store the output of a head."""
    spec, first = rows.spec, task * tile.parts
    out, sums = scratch(spec.value_dim), registers(2, 1)
    largest, total = (buffer[int64(0)] for buffer in sums)
    with serial(tile.rows) as row:
        query, head = rows.query_and_head(row)
        _set(sums[0], lambda _: float32(HIDDEN), 1)
        _set(sums[1], lambda _: float32(0.0), 1)
        _clear(out)
        with serial(tile.parts) as part:
            maximum = partial.maximum[first + part, row]
            _set(sums[0], lambda _: tirx.max(largest, maximum), 1)
        with serial(tile.parts) as part:
            maximum = partial.maximum[first + part, row]
            weight = opaque(exp_nonpositive(maximum - finite(largest)))
            _set(sums[1], lambda _: total + partial.total[first + part, row] * weight, 1)
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


def _along(width: int, vectors: int) -> Iterator[tuple[tirx.Expr, int]]:
    """First index and lanes of pieces of an axis: many vectors at a time, then 16, 8, 4, 2, 1."""
    step = vectors * LANES
    if width >= step:
        with serial(width // step) as block:
            yield block * step, step
    first = width - width % step
    for lanes in (LANES, 8, 4, 2, 1):
        while width - first >= lanes:
            yield int64(first), lanes
            first += lanes


@contextmanager
def _each_vector(extent: int) -> Iterator[tirx.Expr]:
    with serial(extent // LANES) as block, vectorized() as lane:
        yield block * LANES + lane


def _folded(lanes: tirx.Buffer, join: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> tirx.Expr:
    """All 16 lanes in one, by halves; `lanes` is overwritten."""
    half = LANES // 2
    while half:
        with vectorized(half) as lane:
            T.buffer_store(lanes, join(lanes[lane], lanes[lane + half]), [lane])
        half //= 2
    return lanes[int64(0)]


def _set(target: tirx.Buffer, value: Callable[[tirx.Expr], tirx.Expr], lanes: int = LANES) -> None:
    with vectorized(lanes) as lane:
        T.buffer_store(target, value(lane), [lane])


def _clear(buffer: tirx.Buffer) -> None:
    with serial(buffer.shape[0]) as i:
        T.buffer_store(buffer, float32(0.0), [i])
