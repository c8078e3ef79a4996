"""The operands of a block found from its softmax, and where its result goes."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx

from ..index_analysis.index_domain import Index, integer, is_integer
from .elements import Element, Points
from .frame import Axes, Sides
from .graph import NearMiss, dtype_of, shape_of
from .layout import Frame, Operand, Operands, Placed, placed_mask
from .operands import Recipe, recipe, trail, views_of
from .products import SUMMED, UNIT
from .scores import Mask
from .weights import Weights


class Block:
    """One block.

    Parameters
    ----------
    scores : Element
        The input of the softmax, at its axes.
    key : int
        The axis of the softmax.
    """

    def __init__(
        self, points: Points, scores: Element, key: int, sides: Sides, weights: Weights
    ) -> None:
        self.points, self.weights, self.product = points, weights, weights.product
        self.axes: Sequence[tirx.Var] = scores.indices
        self.key, self.extents = key, shape_of(scores.tensor)
        query, key_ = trail(points, sides.query), trail(points, sides.key)
        self.operands = Operands(
            Operand(query, sides.summed, sides.size),
            Operand(key_, sides.summed, sides.size),
            self._value(),
        )

    def _value(self) -> Operand:
        """The value that meets a weight."""
        product, side = self.product, self.weights.side
        met = dict(zip(product.letters[side], self.weights.element.indices, strict=True))
        self._check_sum(met.pop(SUMMED), [i for c, i in met.items() if c != UNIT])
        self._check_lengths(shape_of(product.operands[1 - side]), product.letters[1 - side])
        self.letter, size = self._width(met)
        width = self.points.axis("w", size)
        at = [width if c == self.letter else met.get(c, integer(0)) for c in product.out]
        element = product.element(1 - side, at, self.axes[self.key])
        return Operand(views_of(self.points, element), width, size)

    def _check_lengths(self, shape: Sequence[Index], letters: Sequence[str]) -> None:
        keys, values = self.extents[self.key], shape[list(letters).index(SUMMED)]
        if not self.points.domain.is_equal(keys, values):
            message = f"there are {keys} keys and {values} values"
            raise NearMiss("lengths", message, self.product.result)

    def _check_sum(self, summed: Index, others: Sequence[Index]) -> None:
        axis = self.axes[self.key]
        rest = Element(self.product.result, tuple(others))
        if not self.points.domain.is_equal(summed, axis) or rest.depends_on(axis):
            message = "the product with the values sums over another axis than the softmax"
            raise NearMiss("softmax-axis", message, self.product.result)

    def _width(self, met: dict[str, Index]) -> tuple[str, Index]:
        """The axis of the value product that the weights do not have: its letter and extent."""
        out = dict(zip(self.product.out, shape_of(self.product.result), strict=True))
        free = [c for c in out if c not in met]
        free = [c for c in free if not is_integer(out[c], 1)] or free[-1:]
        if len(free) != 1:
            message = f"weights are broadcast to a product of shape {list(out.values())}"
            raise NearMiss("weights-broadcast", message, self.product.result)
        return free[0], out[free[0]]

    def place(self, masks: Sequence[Mask], result: relax.Expr) -> Placed:
        """For a result that is the value product, or a view of it.

        Raises
        ------
        NearMiss
            If no permutation and reshape of existing tensors gives the operands.
        """
        points, operands = self.points, self.operands
        axes = Axes(points, self.axes, self.extents, self.key)
        names = ["q", "k", "v", "the result", *(f"the mask of `{m.binding.name}`" for m in masks)]
        missing: list[str] = []
        for frame in axes.frames(*operands.trails):
            tensors, out = operands.placed(points, frame), self._out(frame, result)
            recipes = [*tensors, out, *(placed_mask(points, mask, frame) for mask in masks)]
            found = [one for one in recipes if one is not None]
            if len(found) == len(recipes):
                q, k, v, whole, *shown = found
                return Placed(frame, (q, k, v), tuple(zip(masks, shown, strict=True)), whole)
            missing = [name for name, one in zip(names, recipes, strict=True) if one is None]
        message = f"no permutation and reshape gives {', '.join(missing)} as (B, H, S, D)"
        raise NearMiss("layout", message, self.product.result)

    def _out(self, frame: Frame, result: relax.Expr) -> Recipe | None:
        """How `result` lies in (B, H, Sq, Dv)."""
        product, points = self.product, self.points
        axes = points.axes_of(result, "o")
        *_, shown = points.chain(Element(result, axes))
        named = dict(zip(product.out, shown.indices, strict=True))
        letters = zip(product.letters[self.weights.side], self.weights.own, strict=True)
        own = {axis: named.get(c, integer(0)) for c, axis in letters}
        origin = points.at(Element(product.result, self.weights.origin), own).indices
        back = dict(zip(self.axes, origin, strict=True))
        place = points.at(Element(product.result, frame.back), back).indices
        extents = [*frame.extents[:3], self.operands.value.size]
        ours = relax.Var("attention", relax.TensorType(extents, dtype_of(result)))
        element = points.simplified(Element(ours, (*place, named[self.letter])))
        return recipe(points, element, axes, shape_of(result))
