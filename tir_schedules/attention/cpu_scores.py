"""What the CPU kernels of attention share: rows and what they see, and from q . k to a score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import split
from ..cpu.vector_math import tanh
from ..emit import int64, scratch, serial
from .spec import AttentionSpec

HIDDEN = float("-inf")
LOWEST = float(ml_dtypes.finfo("float32").min)


@dataclass(frozen=True)
class Rows:
    """Rows `first` to `last` of the queries that read one key/value head.

    Row r is query r // group of the head's query head r % group, so that rows side by side see
    about the same keys.
    """

    spec: AttentionSpec
    batch: tirx.Expr
    head: tirx.Expr
    first: tirx.Expr
    last: tirx.Expr
    first_query: tirx.Expr
    last_query: tirx.Expr

    @staticmethod
    def make(
        spec: AttentionSpec, batch: tirx.Expr, head: tirx.Expr, first: tirx.Expr, last: tirx.Expr
    ) -> Rows:
        first, last = opaque(first), opaque(last)
        queries = [opaque(split(row, int64(spec.group))[0]) for row in (first, last)]
        return Rows(spec, opaque(batch), opaque(head), first, last, *queries)

    def query_and_head(self, row: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Of the row-th of these; beyond the last row, of the last."""
        query, member = split(tirx.min(self.first + row, self.last), int64(self.spec.group))
        return opaque(query), opaque(self.head * self.spec.group + member)

    def visible_keys(self) -> tuple[tirx.Expr, tirx.Expr]:
        """Keys from start to before stop: every key that one of the rows sees is among them."""
        start, stop = int64(0), self.spec.num_keys
        if self.spec.last_visible is not None:
            stop = tirx.min(stop, self.last_query + self.spec.last_visible + 1)
        if self.spec.first_visible is not None:
            start = tirx.max(start, self.first_query + self.spec.first_visible)
        start = opaque(start)
        return start, opaque(tirx.max(stop, start))

    def hides(self, query: tirx.Expr, key: tirx.Expr) -> tirx.Expr:
        """Whether offset and window hide a key from a query."""
        upper, lower = self.spec.last_visible, self.spec.first_visible
        tests = [] if upper is None else [key > query + upper]
        tests += [] if lower is None else [key < query + lower]
        return tirx.any(*tests) if tests else tirx.const(False, "bool")

    def by_visibility(
        self, first: tirx.Expr, last: tirx.Expr, body: Callable[[bool], None]
    ) -> None:
        """Emit ``body(masked)`` for keys `first` to `last`, unmasked where every row sees all."""
        upper, lower = self.spec.last_visible, self.spec.first_visible
        tests = [] if upper is None else [self.first_query + upper >= last]
        tests += [] if lower is None else [self.last_query + lower <= first]
        if not tests:
            body(False)
            return
        with T.If(tirx.all(*tests)):
            with T.Then():
                body(False)
            with T.Else():
                body(True)

    def bias(self, query: tirx.Expr, head: tirx.Expr, key: tirx.Expr) -> tirx.Expr:
        """An element of the bias in float32; of a bool one 0 for True, -inf for False."""
        buffer = self.spec.bias
        assert buffer is not None
        where = [self.batch, head, query, key][4 - len(buffer.shape) :]
        pairs = zip(buffer.shape, where, strict=True)
        value = buffer[tuple(int64(0) if is_one(extent) else at for extent, at in pairs)]
        if is_mask(self.spec):
            return tirx.Select(value, float32(0.0), float32(HIDDEN))
        return value.astype("float32")

    def store_mean(self, query: tirx.Expr, head: tirx.Expr) -> None:
        """Output the mean of the values of all keys, NaN if there are none."""
        spec, mean = self.spec, scratch(self.spec.value_dim)
        with serial(spec.value_dim) as d:
            T.buffer_store(mean, float32(0.0), [d])
        with serial(spec.num_keys) as key, serial(spec.value_dim) as d:
            value = spec.v[self.batch, self.head, key, d].astype("float32")
            T.buffer_store(mean, mean[d] + value, [d])
        count = opaque(spec.num_keys.astype("float32"))  # no division by a constant 0
        with serial(spec.value_dim) as d:
            value = (mean[d] / count).astype(spec.dtype)
            T.buffer_store(spec.out, value, [self.batch, head, query, d])


def capped(score: tirx.Expr, softcap: float) -> tirx.Expr:
    """softcap * tanh(score / softcap), float32; `score` where softcap is 0."""
    return tanh(score * float32(1.0 / softcap)) * float32(softcap) if softcap else score


def with_bias(spec: AttentionSpec, score: tirx.Expr, bias: tirx.Expr) -> tirx.Expr:
    """Add a float bias. False and -inf select: garbage in a hidden key stays there."""
    if is_mask(spec):
        return tirx.Select(bias >= float32(0.0), score, float32(HIDDEN))
    return tirx.Select(bias == float32(HIDDEN), float32(HIDDEN), score + bias)


def bias_differs_by_row(spec: AttentionSpec) -> bool:
    """Whether heads or queries have biases of their own."""
    shape = [] if spec.bias is None else list(spec.bias.shape)[-3:-1]
    return any(not is_one(extent) for extent in shape)


def finite(maximum: tirx.Expr) -> tirx.Expr:
    """0 for the maximum of a row that has seen nothing: exp(-inf - 0) is 0."""
    return tirx.Select(maximum == float32(HIDDEN), float32(0.0), maximum)


def inverse(spec: AttentionSpec, total: tirx.Expr) -> tirx.Expr:
    """1 / the sum of weights; NaN * 0 is the value of an empty row, unless that is to be zero."""
    value = float32(1.0) / total
    if spec.empty_row == "zero":
        return tirx.Select(total == float32(0.0), float32(0.0), value)
    return value


def is_uniform(maximum: tirx.Expr, total: tirx.Expr) -> tirx.Expr:
    """Whether `empty_row` "uniform" applies: hidden keys count as scores of the lowest number."""
    return tirx.all(maximum <= float32(LOWEST), tirx.Not(tirx.isnan(total)))


def is_mask(spec: AttentionSpec) -> bool:
    return spec.bias is not None and str(spec.bias.dtype) == "bool"


def is_one(extent: tirx.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def float32(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


def opaque(value: tirx.Expr) -> tirx.Expr:
    """`value` by way of memory, which LLVM removes.

    TVM's passes spend minutes on symbolic bounds that they see through.
    """
    cell = T.alloc_buffer((int64(1),), str(value.ty.dtype), scope="local")
    T.buffer_store(cell, value, [int64(0)])
    return T.Bind(cell[int64(0)])
