"""The softmax of the CUDA attention kernel: of a tile of scores, in the registers of its warp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import from_neighbour, local
from ..emit import int64, when
from .cuda_block import Block

_LOG2_E = math.log2(math.e)
_HIDDEN = -math.inf
_LOWEST = float(np.finfo("float32").min)


def float32(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


@dataclass(frozen=True)
class Softmax:
    """Running maximum and sum of this lane's two rows (index 0 and 1), and its part of the scores.

    scores[4 n + 2 half + e] is of key 8 n + 2 (lane % 4) + e of the tile. `sum` is of this lane's
    keys alone until `total`. `decay` is what the last tile multiplies earlier sums by.
    `first` and `last` bound the keys of the tile that a row sees, counted from 2 (lane % 4) on, and
    `end` those there are.
    """

    block: Block
    scores: tirx.Buffer
    maximum: tirx.Buffer
    sum: tirx.Buffer
    decay: tirx.Buffer
    first: tirx.Buffer
    last: tirx.Buffer
    end: tirx.Buffer

    @classmethod
    def allocate(cls, block: Block) -> Softmax:
        return cls(
            block=block,
            scores=local(block.tiling.keys // 2),
            maximum=local(2, value=_HIDDEN),
            sum=local(2, value=0.0),
            decay=local(2),
            first=local(2, "int32"),
            last=local(2, "int32"),
            end=local(1, "int32"),
        )

    @property
    def is_binary(self) -> bool:
        """Scores times log2(e) save a product per exponential, where they cannot overflow by it."""
        spec = self.block.spec
        is_bounded = max(abs(spec.scale) * spec.head_dim, spec.softcap) < 2.0**90  # |q · k| < 2³² D
        is_plain = spec.empty_row != "uniform" and not self._adds_bias
        return spec.dtype == "float16" and is_plain and is_bounded

    @property
    def _adds_bias(self) -> bool:
        bias = self.block.spec.bias
        return bias is not None and str(bias.dtype) != "bool"

    def weigh(self, first_key: tirx.Expr) -> None:
        """Scores to exp(score - maximum), in place, with the keys from `first_key` on."""
        self._scale()
        if self.block.spec.bias is not None:
            self._hide(first_key)
        else:
            with when(tirx.Not(self.block.sees_all(first_key))):
                self._hide(first_key)
        with T.unroll(2) as half:
            self._update(half)

    def _scale(self) -> None:
        """scale · x, or cap · tanh(scale · x / cap). Uses tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
        spec, unit = self.block.spec, _LOG2_E if self.is_binary else 1.0

        def scaled(x: tirx.Expr) -> tirx.Expr:
            if spec.softcap == 0.0:
                return x * float32(spec.scale * unit)
            power = T.exp2(x * float32(2.0 * _LOG2_E * spec.scale / spec.softcap))
            cap = spec.softcap * unit
            return float32(cap) - float32(2.0 * cap) / (power + float32(1.0))

        with T.unroll(int(self.scores.shape[0])) as i:
            T.buffer_store(self.scores, scaled(self.scores[i]), [i])

    def _hide(self, first_key: tirx.Expr) -> None:
        """Add the bias to the scores of visible keys, and replace those of all others."""
        self._bound(first_key)
        with T.unroll(2) as half, self._elements(half) as (at, column):
            is_visible = column <= self.last[half]
            if self.block.spec.first_visible is not None:
                is_visible = tirx.all(is_visible, column >= self.first[half])
            score = self._biased(self.scores[at], is_visible, half, first_key, column)
            T.buffer_store(self.scores, score, [at])
            if self.block.spec.empty_row == "uniform":
                self._raise(at, column)

    def _raise(self, at: tirx.Expr, column: tirx.Expr) -> None:
        """Hidden keys get the lowest finite score: they count where a row sees no other."""
        is_hidden = tirx.all(column <= self.end[0], self.scores[at] == float32(_HIDDEN))
        T.buffer_store(self.scores, T.Select(is_hidden, float32(_LOWEST), self.scores[at]), [at])

    def _bound(self, first_key: tirx.Expr) -> None:
        block, spec = self.block, self.block.spec
        lane_first = first_key + T.Cast("int64", self.block.lane % 4 * 2)

        def store(buffer: tirx.Buffer, key: tirx.Expr, i: tirx.Expr | int) -> None:
            column = tirx.max(tirx.min(key - lane_first, int64(block.tiling.keys)), int64(-1))
            T.buffer_store(buffer, T.Cast("int32", column), [i])

        store(self.end, block.num_keys - 1, 0)
        with T.unroll(2) as half:
            row = block.row(half)
            _, query = block.head_and_query(row)
            last = block.num_keys - 1
            if spec.last_visible is not None:
                last = tirx.min(query + spec.last_visible, last)
            store(self.last, T.Select(row < block.num_rows, last, lane_first - 1), half)
            if spec.first_visible is not None:
                store(self.first, query + spec.first_visible, half)

    def _biased(
        self,
        score: tirx.Expr,
        is_visible: tirx.Expr,
        half: tirx.Expr,
        first_key: tirx.Expr,
        column: tirx.Expr,
    ) -> tirx.Expr:
        block, bias = self.block, self.block.spec.bias
        if bias is None:
            return T.Select(is_visible, score, float32(_HIDDEN))
        head, query = block.head_and_query(block.row(half))
        key = first_key + T.Cast("int64", block.lane % 4 * 2 + column)
        where = [block.batch, head, query, key][4 - len(bias.shape) :]
        is_one = [isinstance(d, tirx.IntImm) and int(d) == 1 for d in bias.shape]
        value = bias[tuple(int64(0) if one else i for one, i in zip(is_one, where, strict=True))]
        if self._adds_bias:
            added = T.Cast("float32", value)
            added = T.Select(added == float32(_HIDDEN), added, score + added)
            return T.if_then_else(is_visible, added, float32(_HIDDEN))
        shown = T.if_then_else(is_visible, value, tirx.const(False, "bool"))
        return T.Select(shown, score, float32(_HIDDEN))

    @contextmanager
    def _elements(self, half: tirx.Expr) -> Iterator[tuple[tirx.Expr, tirx.Expr]]:
        """Index in `scores`, and key of the tile counted from this lane's first."""
        with T.unroll(self.block.tiling.keys // 8) as n, T.unroll(2) as e:
            yield n * 4 + half * 2 + e, n * 8 + e

    def _update(self, half: tirx.Expr) -> None:
        """The maximum, then weights and their sum relative to it. No score seen: 0, not NaN."""
        highest, base = local(1), local(1)
        T.buffer_store(highest, self.maximum[half], [0])
        with self._elements(half) as (at, _):
            T.buffer_store(highest, tirx.max(highest[0], self.scores[at]), [0])
        over_quad(highest, 0, tirx.max)
        is_empty = highest[0] == float32(_HIDDEN)
        T.buffer_store(base, T.Select(is_empty, float32(0.0), highest[0]), [0])
        T.buffer_store(self.decay, self._exp(self.maximum[half] - base[0]), [half])
        T.buffer_store(self.maximum, highest[0], [half])
        T.buffer_store(self.sum, self.sum[half] * self.decay[half], [half])
        with self._elements(half) as (at, _):
            T.buffer_store(self.scores, self._exp(self.scores[at] - base[0]), [at])
            T.buffer_store(self.sum, self.sum[half] + self.scores[at], [half])

    def _exp(self, x: tirx.Expr) -> tirx.Expr:
        return T.exp2(x if self.is_binary else x * float32(_LOG2_E))

    def total(self) -> None:
        """Sums of all keys."""
        with T.unroll(2) as half:
            over_quad(self.sum, half, lambda a, b: a + b)

    def normalized(self, value: tirx.Expr, half: tirx.Expr) -> tirx.Expr:
        """Divided by the sum. That is 0 only where the row saw no key, and NaN if a score was."""
        empty = 0.0 if self.block.spec.empty_row == "zero" else math.nan
        is_empty = self.sum[half] == float32(0.0)
        return T.Select(is_empty, float32(empty), value / self.sum[half])


def over_quad(buffer: tirx.Buffer, i: tirx.Expr | int, combine: Callable) -> None:
    """Combine an element over the four lanes that share a row."""
    for distance in (1, 2):
        T.buffer_store(buffer, combine(buffer[i], from_neighbour(buffer[i], distance)), [i])
