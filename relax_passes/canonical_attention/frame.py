"""Batch, head, query and key: which axis of a softmax is which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx

from ..index_analysis.index_domain import Index, integer, is_integer
from .elements import Element, Points, flat, product
from .graph import NearMiss
from .layout import Frame
from .operands import Trail
from .scores import Scores


class Axes:
    """The axes of a softmax, of which `key` is the one it runs over."""

    def __init__(self, points: Points, axes: Sequence[tirx.Var], extents: list[Index], key: int):
        self.points, self.axes, self.extents, self.key = points, axes, extents, key

    def frames(self, query: Trail, key: Trail, value: Trail) -> Iterator[Frame]:
        """The ways to see them as b, h, i, j, best first."""
        found = self._query_axis(query, key, value)
        rest = [n for n in range(len(self.axes)) if n not in (self.key, found)]
        if len(rest) == 1 and (count := self._folded_heads(rest[0], query)):
            yield self._folded(rest[0], count, found)
        for batch, heads in self._groupings(rest, key):
            if all(is_integer(self.extents[n]) for n in heads):
                yield self._frame(batch, heads, found)

    def _query_axis(self, query: Trail, key: Trail, value: Trail) -> int:
        """The last axis that neither keys nor values follow; a product's own row before others."""
        free = [
            n
            for n, axis in enumerate(self.axes)
            if n != self.key and not any(t.base.depends_on(axis) for t in (key, value))
        ]
        if not free:
            message = "keys or values vary along every axis of the softmax: none is the queries'"
            raise NearMiss("no-query-axis", message, query.elements[0].tensor)
        row = query.elements[0].indices[-2]
        rows = [n for n in free if self.points.domain.is_equal(row, self.axes[n])]
        return (rows or free)[-1]

    def _groupings(self, rest: list[int], key: Trail) -> Iterator[tuple[list[int], list[int]]]:
        """Which axes make the batch and which the heads, in order."""
        if len(rest) == 1:
            yield rest, []
            yield [], rest
            return
        is_grouped = len(rest) > 2 and not key.base.depends_on(self.axes[rest[-1]])
        for heads in (2, 1) if is_grouped else (1,):
            yield rest[:-heads], rest[-heads:]
        yield rest[-1:], rest[:-1]
        yield rest, []

    def _frame(self, batch: list[int], heads: list[int], query: int) -> Frame:
        groups = [batch, heads, [query], [self.key]]
        extents = [product([self.extents[n] for n in group]) for group in groups]
        axes = self._new_axes(extents)
        at: dict[tirx.Var, Index] = {}
        for axis, group in zip(axes, groups, strict=True):
            for n in reversed(group):
                axis, at[self.axes[n]] = self._divide(axis, n, is_last=n == group[0])
        back = [
            flat([self.axes[n] for n in group], [self.extents[n] for n in group])
            for group in groups[:3]
        ]
        return Frame(axes, tuple(map(self.points.domain.simplify, extents)), at, tuple(back))

    def _divide(self, place: Index, n: int, is_last: bool) -> tuple[Index, Index]:
        if is_last:
            return integer(0), place
        return self.points.domain.divide(place, self.extents[n])

    def _folded_heads(self, n: int, query: Trail) -> int | None:
        """H, where the query's tensors see one axis N = B · H as n // H and n mod H."""
        for element in query.elements:
            for index in element.indices:
                found: list[int] = []

                def note(mod: tirx.FloorMod, found: list[int] = found) -> None:
                    if mod.a.same_as(self.axes[n]) and is_integer(mod.b):
                        found.append(int(mod.b))

                tvm_ffi.structural_walk(index, (tirx.FloorMod, note))
                if found:
                    return found[0]
        return None

    def _folded(self, n: int, heads: int, query: int) -> Frame:
        whole, per_batch = self.extents[n], integer(heads)
        batch, _ = self.points.domain.divide(whole, per_batch)
        extents = [batch, per_batch, self.extents[query], self.extents[self.key]]
        axes = self._new_axes(extents)
        b, h, i, j = axes
        at = {self.axes[n]: b * per_batch + h, self.axes[query]: i, self.axes[self.key]: j}
        split = self.points.domain.divide(self.axes[n], per_batch)
        return Frame(axes, tuple(extents), at, (*split, self.axes[query]))

    def _new_axes(self, extents: Sequence[Index]) -> tuple[tirx.Var, ...]:
        named = zip("bhij", extents, strict=True)
        return tuple(self.points.axis(name, self.points.domain.simplify(e)) for name, e in named)


@dataclass(frozen=True)
class Sides:
    """The elements of queries and keys that meet in one score, at `summed` of head size `size`."""

    query: Element
    key: Element
    summed: tirx.Var
    size: Index


def sides_of(points: Points, scores: Scores, key_axis: tirx.Var) -> Sides:
    """Which operand of the score product holds the keys: the one that follows the softmax's axis.

    Raises
    ------
    NearMiss
        If both do.
    """
    size = scores.product.summed_extent()
    summed = points.axis("d", size)
    left, right = (
        points.simplified(scores.product.element(side, scores.element.indices, summed))
        for side in (0, 1)
    )
    follows = left.depends_on(key_axis), right.depends_on(key_axis)
    if all(follows):
        message = "queries and keys both vary along the axis of the softmax"
        raise NearMiss("softmax-axis", message, scores.product.result)
    query, key = (right, left) if follows[0] else (left, right)
    return Sides(query, key, summed, size)
