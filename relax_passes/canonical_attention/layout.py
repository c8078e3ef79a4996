"""Queries, keys, values and masks of a block as tensors (B, H, S, D), however they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..index_analysis.index_domain import Index, integer
from .elements import Points
from .operands import Recipe, Trail, pick, views_of
from .scores import Mask


@dataclass(frozen=True)
class Frame:
    """The axes b, h, i, j of a block, and where they lie among the axes of its softmax.

    Attributes
    ----------
    axes, extents : tuple
        b, h, i, j and B, H, Sq, Sk; H is static.
    at : dict of tirx.Var to index
        Each axis of the softmax in terms of b, h, i, j.
    back : tuple of index
        b, h, i in terms of the axes of the softmax.
    """

    axes: tuple[tirx.Var, ...]
    extents: tuple[Index, ...]
    at: dict[tirx.Var, Index]
    back: tuple[Index, ...]


@dataclass(frozen=True)
class Placed:
    """Recipes for q, k, v, the masks, and the result from (B, H, Sq, Dv)."""

    frame: Frame
    operands: tuple[Recipe, Recipe, Recipe]
    masks: tuple[tuple[Mask, Recipe], ...]
    out: Recipe


@dataclass(frozen=True)
class Operand:
    """An operand at the softmax's axes and at its own last one, `last`, of extent `size`."""

    trail: Trail
    last: tirx.Var
    size: Index

    def placed(
        self,
        points: Points,
        frame: Frame,
        axes: Sequence[tirx.Var],
        extents: Sequence[Index],
        at: dict[tirx.Var, Index] | None = None,
    ) -> Recipe | None:
        """The tensor over (axes, last)."""
        trail = self.trail.at(points, frame.at)
        trail = trail if at is None else trail.at(points, at)
        return pick(points, trail, (*axes, self.last), (*extents, self.size))


@dataclass(frozen=True)
class Operands:
    """What meets in one score, and the value that its weight meets."""

    query: Operand
    key: Operand
    value: Operand

    @property
    def trails(self) -> tuple[Trail, Trail, Trail]:
        return self.query.trail, self.key.trail, self.value.trail

    def placed(
        self, points: Points, frame: Frame
    ) -> tuple[Recipe | None, Recipe | None, Recipe | None]:
        """q (B, H, Sq, D), k (B, G, Sk, D) and v (B, G, Sk, Dv) with the smallest G; None for
        those that cannot be made."""
        b, h, i, j = frame.axes
        batch, heads, queries, keys = frame.extents
        q = self.query.placed(points, frame, (b, h, i), (batch, heads, queries))
        k = v = None
        for repeats in self._repeats(points, frame):
            groups = integer(int(heads) // repeats)
            g = points.axis("g", groups)
            place = points, frame, (b, g, j), (batch, groups, keys), {h: g * repeats}
            k, v = self.key.placed(*place), self.value.placed(*place)
            if k is not None and v is not None:
                break
        return q, k, v

    def _repeats(self, points: Points, frame: Frame) -> Iterator[int]:
        """How many query heads may share a key/value head: h only enters as h // repeats."""
        h, heads = frame.axes[1], int(frame.extents[1])
        bases = [x.trail.at(points, frame.at).base for x in (self.key, self.value)]
        for repeats in (r for r in range(heads, 0, -1) if heads % r == 0):
            first = {h: tirx.floordiv(h, repeats) * repeats}
            if all(points.is_same(base, points.at(base, first)) for base in bases):
                yield repeats


def placed_mask(points: Points, mask: Mask, frame: Frame) -> Recipe | None:
    """A mask over the axes that it follows, without leading ones that it does not."""
    found = views_of(points, points.at(mask.element, frame.at))
    follows = [found.base.depends_on(axis) for axis in frame.axes]
    extents = [e if f else integer(1) for e, f in zip(frame.extents, follows, strict=True)]
    leading = min([*(n for n, f in enumerate(follows) if f), 2])
    return pick(points, found, frame.axes[leading:], extents[leading:])
