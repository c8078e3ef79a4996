"""Random programs that compute masks: the same ops in Relax on symbolic sizes and in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.relax import op as R

from tests.relax_passes.index_expressions import evaluate

s, t = tirx.Var("s", "int64"), tirx.Var("t", "int64")
SIZES = ({"s": 1, "t": 1}, {"s": 3, "t": 5}, {"s": 4, "t": 2}, {"s": 6, "t": 6})


@dataclass
class Twin:
    """A Relax tensor and its value for each of `SIZES`."""

    expr: relax.Expr
    values: list[np.ndarray]


class Program:
    """Draws a bool mask over (query, key) of the given sizes, and keeps every value it makes."""

    def __init__(
        self, bb: relax.BlockBuilder, draw: Callable, shape: tuple[Any, Any], padding: relax.Var
    ) -> None:
        self.bb, self.draw, self.padding = bb, draw, padding
        self.queries, self.keys = shape
        self.made: list[Twin] = []
        rng = np.random.default_rng(0)
        hidden = [rng.random((2, 1, 1, self.size(self.keys, k))) < 0.7 for k in range(len(SIZES))]
        self.pad = self.keep(Twin(padding, hidden))

    @staticmethod
    def size(dim: Any, k: int) -> int:
        if isinstance(dim, int):
            return dim
        return int(evaluate(dim, {s: SIZES[k]["s"], t: SIZES[k]["t"]}))

    def keep(self, twin: Twin) -> Twin:
        self.made.append(twin)
        return twin

    def emit(self, call: relax.Expr, compute: Callable[..., np.ndarray], *args: Twin) -> Twin:
        values = [compute(*(a.values[k] for a in args)) for k in range(len(SIZES))]
        return self.keep(Twin(self.bb.emit(call), values))

    def sized(self, call: relax.Expr, compute: Callable[[int], np.ndarray]) -> Twin:
        return self.keep(Twin(self.bb.emit(call), [compute(k) for k in range(len(SIZES))]))

    def number(self, low: int = -3, high: int = 4) -> int:
        return self.draw(st.integers(low, high))

    def positions(self, depth: int) -> Twin:
        """int64, broadcastable to (queries, keys)."""
        makers = [self.rows, self.columns]
        if depth > 0:
            makers += [self.shifted, self.difference, self.absolute, self.divided, self.chosen]
            makers += [self.extremum, self.counted]
        return self.draw(st.sampled_from(makers))(depth - 1)

    def rows(self, _depth: int) -> Twin:
        line = self.line(self.queries)
        return self.emit(R.expand_dims(line.expr, 1), lambda a: a[:, None], line)

    def columns(self, _depth: int) -> Twin:
        line = self.line(self.keys)
        return self.emit(R.expand_dims(line.expr, 0), lambda a: a[None], line)

    def line(self, dim: Any) -> Twin:
        start, step = self.number(), self.draw(st.sampled_from([1, 1, 1, 2]))
        begin = start + self.draw(st.sampled_from([0, 0, self.keys - self.queries]))
        call = R.arange(begin, begin + step * dim, step, "int64")

        def compute(k: int) -> np.ndarray:
            return self.size(begin, k) + step * np.arange(self.size(dim, k))

        return self.sized(call, compute)

    def shifted(self, depth: int) -> Twin:
        x, c = self.positions(depth), self.number()
        op, compute = self.draw(
            st.sampled_from([(R.add, np.add), (R.subtract, np.subtract), (R.multiply, np.multiply)])
        )
        return self.emit(op(x.expr, relax.const(c, "int64")), lambda a: compute(a, c), x)

    def difference(self, depth: int) -> Twin:
        x, y = self.positions(depth), self.positions(depth)
        return self.emit(R.subtract(x.expr, y.expr), np.subtract, x, y)

    def absolute(self, depth: int) -> Twin:
        x = self.difference(depth)
        return self.emit(R.abs(x.expr), np.abs, x)

    def divided(self, depth: int) -> Twin:
        x, c = self.positions(depth), self.number(1, 3)
        op, compute = self.draw(
            st.sampled_from([(R.floor_divide, np.floor_divide), (R.floor_mod, np.mod)])
        )
        return self.emit(op(x.expr, relax.const(c, "int64")), lambda a: compute(a, c), x)

    def chosen(self, depth: int) -> Twin:
        c, x, y = self.mask(depth), self.positions(depth), self.positions(depth)
        return self.emit(R.where(c.expr, x.expr, y.expr), np.where, c, x, y)

    def extremum(self, depth: int) -> Twin:
        x, y = self.positions(depth), self.positions(depth)
        op, compute = self.draw(st.sampled_from([(R.minimum, np.minimum), (R.maximum, np.maximum)]))
        return self.emit(op(x.expr, y.expr), compute, x, y)

    def counted(self, depth: int) -> Twin:
        c = self.mask(depth)
        x = self.emit(R.astype(c.expr, "int64"), lambda a: a.astype(np.int64), c)
        return self.emit(R.cumsum(x.expr, -1), lambda a: np.cumsum(a, -1), x)

    def mask(self, depth: int) -> Twin:
        """bool, broadcastable to (2, 1, queries, keys)."""
        makers = [self.compared, self.compared, self.stored, self.triangle, self.padded]
        if depth > 0:
            makers += [self.joined, self.joined, self.inverted, self.selected, self.square]
        return self.draw(st.sampled_from(makers))(depth - 1)

    def compared(self, depth: int) -> Twin:
        x, y = self.positions(depth), self.positions(depth)
        names = ["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"]
        name = self.draw(st.sampled_from(names))
        return self.emit(getattr(R, name)(x.expr, y.expr), getattr(np, name), x, y)

    def padded(self, _depth: int) -> Twin:
        return self.pad

    def stored(self, _depth: int) -> Twin:
        """A stored 8×8 band, cut to size."""
        lower, upper = self.number(-4, 0), self.number(-1, 3)
        shift = np.arange(8)[None] - np.arange(8)[:, None]
        band = (shift <= upper) & ((shift >= lower) | self.draw(st.booleans()))
        if self.draw(st.integers(0, 4)) == 0:
            band[2, 3] = not band[2, 3]
        begin = self.draw(st.sampled_from([0, 0, 1]))
        cut = R.strided_slice(
            relax.const(band),
            [0, 1],
            [begin, 0],
            [self.queries + begin, self.keys],
            [1, 1],
            assume_inbound=True,
        )
        return self.sized(
            cut,
            lambda k: band[begin : begin + self.size(self.queries, k), : self.size(self.keys, k)],
        )

    def triangle(self, _depth: int) -> Twin:
        c = self.number()
        op, compute = self.draw(st.sampled_from([(R.tril, np.tril), (R.triu, np.triu)]))
        x = self.bb.emit(R.ones((self.queries, self.keys), "float32"))
        call = R.astype(self.bb.emit(op(x, c)), "bool")

        def value(k: int) -> np.ndarray:
            return compute(np.ones((self.size(self.queries, k), self.size(self.keys, k)), bool), c)

        return self.sized(call, value)

    def joined(self, depth: int) -> Twin:
        x, y = self.mask(depth), self.mask(depth)
        op, compute = self.draw(
            st.sampled_from(
                [
                    (R.logical_and, np.logical_and),
                    (R.bitwise_and, np.logical_and),
                    (R.logical_or, np.logical_or),
                    (R.logical_xor, np.logical_xor),
                ]
            )
        )
        return self.emit(op(x.expr, y.expr), compute, x, y)

    def inverted(self, depth: int) -> Twin:
        x = self.mask(depth)
        return self.emit(R.logical_not(x.expr), np.logical_not, x)

    def selected(self, depth: int) -> Twin:
        c, x, y = self.mask(depth), self.mask(depth), self.mask(depth)
        return self.emit(R.where(c.expr, x.expr, y.expr), np.where, c, x, y)

    def square(self, depth: int) -> Twin:
        """Turned over, where there are as many keys as queries."""
        x = self.mask(depth)
        dims = list(x.expr.ty.shape)
        if len(dims) != 2 or not tirx_equal(dims[0], dims[1]):
            return x
        return self.emit(R.permute_dims(x.expr), np.transpose, x)


def tirx_equal(a: Any, b: Any) -> bool:
    import tvm

    return tvm.sym.Analyzer().can_prove_equal(a, b)
