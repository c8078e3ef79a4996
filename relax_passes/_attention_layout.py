"""Queries, keys, values and result of a block as tensors (B, H, S, D), however they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import relax, tirx

from relax_passes._attention_elements import Element, Points
from relax_passes._attention_frame import Axes, Frame, Sides
from relax_passes._attention_graph import NearMiss, dtype_of, shape_of
from relax_passes._attention_operands import Recipe, Trail, pick, recipe, trail, views_of
from relax_passes._attention_products import SUMMED, UNIT
from relax_passes._attention_scores import Mask
from relax_passes._attention_weights import Weights
from relax_passes._index_domain import Index, integer, is_integer

Values = dict[tirx.Var, Index]


@dataclass(frozen=True)
class Placed:
    """Recipes for q, k, v, the masks, and the value product from (B, H, Sq, Dv)."""

    frame: Frame
    operands: tuple[Recipe, Recipe, Recipe]
    masks: tuple[tuple[Mask, Recipe], ...]
    out: Recipe


class Layout:
    """The operands of one block at the axes of its softmax, `axes`, of which one is the keys'."""

    def __init__(
        self, points: Points, scores: Element, key: int, sides: Sides, weights: Weights
    ) -> None:
        self.points, self.axes, self.weights = points, scores.indices, weights
        self.key_axis = self.axes[key]
        self.key_index, self.summed, self.size = key, sides.summed, sides.size
        self.extents = shape_of(scores.tensor)
        self.query, self.key = trail(points, sides.query), trail(points, sides.key)
        self.width, self.width_letter, element = self._value()
        self.value = views_of(points, element)

    def _value(self) -> tuple[tirx.Var, str, Element]:
        """The axis of the values' width, its letter, and the value that meets a weight."""
        product, side = self.weights.product, self.weights.side
        met = dict(zip(product.letters[side], self.weights.element.indices, strict=True))
        summed = met.pop(SUMMED)
        met.pop(UNIT, None)
        others = Element(product.result, tuple(met.values()))
        is_over_keys = self.points.domain.is_equal(summed, self.key_axis)
        if not is_over_keys or others.depends_on(self.key_axis):
            message = "the product with the values sums over another axis than the softmax"
            raise NearMiss("softmax-axis", message, product.result)
        out = dict(zip(product.out, shape_of(product.result), strict=True))
        free = [c for c in out if c not in met and not is_integer(out[c], 1)]
        free = free or [c for c in out if c not in met]
        if len(free) != 1:
            message = f"weights are broadcast to a product of shape {list(out.values())}"
            raise NearMiss("weights-broadcast", message, product.result)
        width = self.points.axis("w", out[free[0]])
        self.last = {width: out[free[0]], self.summed: self.size}
        at = [width if c == free[0] else met.get(c, integer(0)) for c in product.out]
        return width, free[0], product.element(1 - side, at, self.key_axis)

    def place(self, masks: Sequence[Mask]) -> Placed:
        """
        Raises
        ------
        NearMiss
            If no permutation and reshape of existing tensors gives the operands.
        """
        axes = Axes(self.points, self.axes, self.extents, self.key_index)
        for frame in axes.frames(self.query, self.key, self.value):
            operands = self._operands(frame)
            out = self._out(frame)
            found = [(mask, self._mask(mask, frame)) for mask in masks]
            placed = tuple((mask, r) for mask, r in found if r is not None)
            if operands is not None and out is not None and len(placed) == len(masks):
                return Placed(frame, operands, placed, out)
        message = "no permutation and reshape of q, k, v, a mask and the result gives (B, H, S, D)"
        raise NearMiss("layout", message, self.weights.product.result)

    def _operands(self, frame: Frame) -> tuple[Recipe, Recipe, Recipe] | None:
        b, h, i, j = frame.axes
        batch, heads, queries, keys = frame.extents
        q = self._tensor(self.query, frame, (b, h, i, self.summed), (batch, heads, queries))
        for repeats in self._repeats(frame) if q is not None else ():
            groups = integer(int(heads) // repeats)
            g = self.points.axis("g", groups)
            at, extents = {h: g * repeats}, (batch, groups, keys)
            k = self._tensor(self.key, frame, (b, g, j, self.summed), extents, at)
            v = k and self._tensor(self.value, frame, (b, g, j, self.width), extents, at)
            if q is not None and k is not None and v is not None:
                return q, k, v
        return None

    def _tensor(
        self,
        found: Trail,
        frame: Frame,
        axes: Sequence[tirx.Var],
        extents: Sequence[Index],
        at: Values | None = None,
    ) -> Recipe | None:
        placed = found.at(self.points, frame.at).at(self.points, at or {})
        last = self.last[axes[-1]]
        return pick(self.points, placed, axes, (*extents, last))

    def _repeats(self, frame: Frame) -> Iterator[int]:
        """How many query heads may share a key/value head: h only enters as h // repeats."""
        h, heads = frame.axes[1], int(frame.extents[1])
        bases = [t.at(self.points, frame.at).base for t in (self.key, self.value)]
        for repeats in (r for r in range(heads, 0, -1) if heads % r == 0):
            first = {h: tirx.floordiv(h, repeats) * repeats}
            if all(self.points.is_same(base, self.points.at(base, first)) for base in bases):
                yield repeats

    def _mask(self, mask: Mask, frame: Frame) -> Recipe | None:
        """Over the axes that it follows, without leading ones that it does not."""
        found = views_of(self.points, self.points.at(mask.element, frame.at))
        follows = [found.base.depends_on(axis) for axis in frame.axes]
        extents = [e if f else integer(1) for e, f in zip(frame.extents, follows, strict=True)]
        leading = min([*(n for n, f in enumerate(follows) if f), 2])
        return pick(self.points, found, frame.axes[leading:], extents[leading:])

    def _out(self, frame: Frame) -> Recipe | None:
        """How the value product lies in (B, H, Sq, Dv)."""
        product, side = self.weights.product, self.weights.side
        axes = self.points.axes_of(product.result, "o")
        named = dict(zip(product.out, axes, strict=True))
        letters = zip(product.letters[side], self.weights.own, strict=True)
        own = {axis: named.get(c, integer(0)) for c, axis in letters}
        origin = self.points.at(Element(product.result, self.weights.origin), own).indices
        back = dict(zip(self.axes, origin, strict=True))
        place = self.points.at(Element(product.result, frame.back), back).indices
        extents = [*frame.extents[:3], self.last[self.width]]
        result = relax.Var("attention", relax.TensorType(extents, dtype_of(product.result)))
        element = self.points.simplified(Element(result, (*place, named[self.width_letter])))
        return recipe(self.points, element, axes, shape_of(product.result))
