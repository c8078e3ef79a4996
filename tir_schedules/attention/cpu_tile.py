"""A block of rows meets a tile of keys: scores, online softmax, and the product with the values.

Rows are the lanes. Loop nest::

    for 8 keys:   registers [8, rows] = k q;  cap, bias, mask, maximum;  store to scores
    scores = exp(scores - maximum);  sum
    for 8 of Dv:  registers [8, rows] = output * correction + v scores
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cpu.vector_math import exp_nonpositive
from ..emit import LANES, ceildiv, int64, registers, scratch, serial, vectorized
from .cpu_scores import (
    HIDDEN,
    Rows,
    bias_differs_by_row,
    capped,
    finite,
    float32,
    is_mask,
    opaque,
    with_bias,
)

Read: TypeAlias = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
"""Element (key of the tile, dimension) of keys or values, float32."""

Vectors: TypeAlias = Sequence[tirx.Buffer]
"""A number for each row: a buffer of 16 lanes for each 16 rows."""

Sums: TypeAlias = Sequence[Vectors]


@dataclass(frozen=True)
class RowTile:
    """Register tile of `depth` keys (or dimensions) by `vectors` of 16 rows; keys in a tile."""

    depth: int
    vectors: int
    keys: int

    @property
    def rows(self) -> int:
        return self.vectors * LANES


class KeyTile:
    """The state of a block of rows, and how a tile of keys changes it."""

    def __init__(self, rows: Rows, tile: RowTile) -> None:
        spec = rows.spec
        self.rows, self.spec, self.tile = rows, spec, tile
        self.queries = scratch(spec.head_dim, tile.rows)
        self.scores = scratch(tile.keys, tile.rows)
        self.output = scratch(spec.value_dim, tile.rows)
        self.bias = scratch(tile.keys, tile.rows) if bias_differs_by_row(spec) else None
        self.query_of = T.alloc_buffer((int64(tile.rows),), "int32")
        self.maximum, self.total, self.shift, self.correction = (
            registers(tile.vectors) for _ in range(4)
        )
        widths = () if spec.dtype == "float32" else (spec.head_dim, spec.value_dim)
        self.wide = [scratch(tile.keys, width) for width in widths]
        for maximum in self.maximum:
            _set(maximum, lambda _: float32(HIDDEN), maximum)
        with serial(spec.value_dim) as d, serial(tile.vectors) as v, vectorized() as lane:
            T.buffer_store(self.output, float32(0.0), [d, v * LANES + lane])

    def emit(self, first: tirx.Expr, count: tirx.Expr) -> None:
        """Take in `count` keys from `first` on."""
        keys, values = self._operands(first)
        if self.wide:
            keys, values = (
                _widened(read, copy, count)
                for read, copy in zip((keys, values), self.wide, strict=True)
            )
        if self.bias is not None:
            self._load_bias(self.bias, first, count)
        self._score(first, count, keys)
        self._softmax(count)
        self._accumulate(first, count, values)

    def _operands(self, first: tirx.Expr) -> tuple[Read, Read]:
        batch, head, spec = self.rows.batch, self.rows.head, self.spec
        return (
            lambda key, d: spec.k[batch, head, first + key, d].astype("float32"),
            lambda key, d: spec.v[batch, head, first + key, d].astype("float32"),
        )

    def _load_bias(self, tile: tirx.Buffer, first: tirx.Expr, count: tirx.Expr) -> None:
        with serial(self.tile.rows) as row:
            query, head = self.rows.query_and_head(row)
            with serial(count) as key:
                value = self.rows.bias(query, head, first + key)
                T.buffer_store(tile, value, [key, row])

    def _score(self, first: tirx.Expr, count: tirx.Expr, keys: Read) -> None:
        """Scores, and the maximum so far; keys beyond `count` repeat the last one."""
        depth = self.tile.depth
        for shift, maximum in zip(self.shift, self.maximum, strict=True):
            _set(shift, lambda x: x, maximum)
        with serial(ceildiv(count, depth)) as step:
            at = [opaque(tirx.min(step * depth + i, count - 1)) for i in range(depth)]
            sums = [registers(self.tile.vectors) for _ in at]
            with serial(self.spec.head_dim) as d:
                _add_products(sums, [keys(key, d) for key in at], self.queries, d)

            def finish(masked: bool, at: Sequence[tirx.Expr] = at, sums: Sums = sums) -> None:
                for key, row in zip(at, sums, strict=True):
                    self._finish_scores(first + key, key, row, masked)

            self.rows.by_visibility(first, first + count - 1, finish)

    def _finish_scores(
        self, position: tirx.Expr, key: tirx.Expr, sums: Vectors, masked: bool
    ) -> None:
        hides = self._hides(position) if masked else None
        bias = self._bias(key, position)

        def score(row: tirx.Expr, product: tirx.Expr) -> tirx.Expr:
            value = capped(product, self.spec.softcap)
            if bias is not None:
                value = with_bias(self.spec, value, bias(row))
            return value if hides is None else tirx.Select(hides(row), float32(HIDDEN), value)

        for v, (acc, maximum) in enumerate(zip(sums, self.maximum, strict=True)):
            with vectorized() as lane:
                T.buffer_store(acc, score(v * LANES + lane, acc[lane]), [lane])
            _set(maximum, tirx.max, maximum, acc)
            with vectorized() as lane:
                T.buffer_store(self.scores, acc[lane], [key, v * LANES + lane])

    def _bias(self, key: tirx.Expr, position: tirx.Expr) -> Callable[[tirx.Expr], tirx.Expr] | None:
        """The bias of a key for each row."""
        tile = self.bias
        if self.spec.bias is None:
            return None
        if tile is not None:
            return lambda row: tile[key, row]
        shared = T.Bind(self.rows.bias(int64(0), int64(0), position))
        return lambda _: shared

    def _hides(self, key: tirx.Expr) -> Callable[[tirx.Expr], tirx.Expr]:
        """Whether a row of the block does not see `key`, compared in 32 bits."""

        def bound(visible: tirx.Expr) -> tirx.Expr:
            distance, limit = key - visible - self.rows.first_query, int64(1 << 30)
            return opaque(tirx.max(tirx.min(distance, limit), -limit).astype("int32"))

        upper, lower = self.spec.last_visible, self.spec.first_visible
        least = None if upper is None else bound(upper)
        most = None if lower is None else bound(lower)

        def hides(row: tirx.Expr) -> tirx.Expr:
            tests = [] if least is None else [self.query_of[row] < least]
            tests += [] if most is None else [self.query_of[row] > most]
            return tirx.any(*tests)

        return hides

    def _softmax(self, count: tirx.Expr) -> None:
        """scores = exp(scores - maximum); what was summed under another maximum is corrected."""
        vectors = zip(self.shift, self.correction, self.total, self.maximum, strict=True)
        for shift, correction, total, maximum in vectors:
            _set(correction, lambda s, m: exp_nonpositive(s - finite(m)), shift, maximum)
            _set(shift, finite, maximum)
            _set(total, mul, total, correction)
        with serial(count) as key:
            for v, (shift, total) in enumerate(zip(self.shift, self.total, strict=True)):
                with vectorized() as lane:
                    row = v * LANES + lane
                    weight = T.Bind(exp_nonpositive(self.scores[key, row] - shift[lane]))
                    T.buffer_store(self.scores, weight, [key, row])
                with vectorized() as lane:
                    value = total[lane] + self.scores[key, v * LANES + lane]
                    T.buffer_store(total, value, [lane])

    def _accumulate(self, first: tirx.Expr, count: tirx.Expr, values: Read) -> None:
        """output = output * correction + v scores; dimensions beyond the last repeat it."""
        depth, width = self.tile.depth, self.spec.value_dim
        with serial(ceildiv(width, depth)) as step:
            at = [opaque(tirx.min(step * depth + i, width - 1)) for i in range(depth)]
            sums = [registers(self.tile.vectors) for _ in at]
            for d, row in zip(at, sums, strict=True):
                for v, (acc, correction) in enumerate(zip(row, self.correction, strict=True)):
                    with vectorized() as lane:
                        value = self.output[d, v * LANES + lane] * correction[lane]
                        T.buffer_store(acc, value, [lane])

            def add(masked: bool, at: Sequence[tirx.Expr] = at, sums: Sums = sums) -> None:
                selects = masked or is_mask(self.spec)
                with serial(count) as key:
                    _add_products(sums, [values(key, d) for d in at], self.scores, key, selects)

            self.rows.by_visibility(first, first + count - 1, add)
            for d, row in zip(at, sums, strict=True):
                for v, acc in enumerate(row):
                    with vectorized() as lane:
                        T.buffer_store(self.output, acc[lane], [d, v * LANES + lane])


def _widened(read: Read, copy: tirx.Buffer, count: tirx.Expr) -> Read:
    """A float32 copy of `count` keys or values."""
    width = int(copy.shape[1])
    whole = width - width % LANES
    with serial(count) as key:
        with serial(whole // LANES) as block, vectorized() as lane:
            T.buffer_store(copy, read(key, block * LANES + lane), [key, block * LANES + lane])
        with serial(width - whole) as rest:
            T.buffer_store(copy, read(key, whole + rest), [key, whole + rest])
    return lambda key, d: copy[key, d]


def _add_products(
    sums: Sums,
    left: Sequence[tirx.Expr],
    right: tirx.Buffer,
    depth: tirx.Expr,
    selects: bool = False,
) -> None:
    """sums[i][rows] += left[i] * right[depth, rows].

    Where `selects`, not if right is 0 there: NaN or infinity on the left then stays out.
    """
    for x, row in zip([T.Bind(value) for value in left], sums, strict=True):
        for v, acc in enumerate(row):
            with vectorized() as lane:
                weight = right[depth, v * LANES + lane]
                total = acc[lane] + x * weight
                if selects:
                    total = tirx.Select(weight != float32(0.0), total, acc[lane])
                T.buffer_store(acc, total, [lane])


def _set(target: tirx.Buffer, function: Callable[..., tirx.Expr], *sources: tirx.Buffer) -> None:
    """target = function(*sources), lane by lane."""
    with vectorized() as lane:
        T.buffer_store(target, function(*(source[lane] for source in sources)), [lane])
