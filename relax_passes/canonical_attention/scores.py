"""From a softmax up to the product of queries and keys: the factors and masks in between."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax, tirx

from .._adjoint import used_vars
from .elements import Element, Points, broadcast_element
from .graph import FLOATS, NearMiss, dtype_of, is_wider, shape_of
from .products import Product, product_of
from .reach import PRODUCTS, sources

_LONGEST = 64  # bindings looked at for one softmax


@dataclass(frozen=True)
class Mask:
    """A step that changes scores key by key.

    Attributes
    ----------
    element : Element
        Of the tensor that is added, or of the condition, for a score.
    fill : float or None
        What scores become where the condition equals `hides`; None: the tensor is added.
    sign : int
        -1: the tensor is subtracted.
    dtype : str
        Of the scores at this step.
    binding : relax.Var
        The scores after it.
    """

    element: Element
    fill: float | None
    hides: bool
    sign: int
    dtype: str
    binding: relax.Var


@dataclass(frozen=True)
class Scores:
    """masks(scale · product), or masks(bound · tanh(scale · product)), masks in order.

    `element` says which element of the product one score is; `is_shifted`, that the maximum of
    each row was subtracted, which softmax does not notice.
    """

    product: Product
    element: Element
    scale: float = 1.0
    bound: float | None = None
    masks: tuple[Mask, ...] = ()
    is_shifted: bool = False


class ScoreReader:
    """Reads upwards from the input of a softmax over `axis`."""

    def __init__(self, points: Points, axis: tirx.Var) -> None:
        self.points, self.graph, self.axis = points, points.graph, axis
        self.left = _LONGEST

    def read(self, element: Element) -> Scores:
        """What the score `element` is.

        Raises
        ------
        NearMiss
            With the first step that is none of attention's.
        """
        self.left -= 1
        tensor = element.tensor
        if self.left < 0:
            raise NearMiss("no-product", f"no product within {_LONGEST} steps of softmax", tensor)
        below = self.points.step(element)
        if below is not None:
            return self.read(below)
        product = product_of(self.graph, tensor)
        if product is not None:
            return Scores(product, element)
        name, call = self.graph.call(tensor)
        step = getattr(self, f"_{name}", None)
        if step is None:
            message = f"scores come from {self.graph.words(tensor)}"
            raise NearMiss("no-product", message, tensor)
        return step(call, element)

    def _below(self, element: Element, source: relax.Expr) -> Scores:
        """`read` on an operand that is not broadcast."""
        if not self.points.same_shape(source, element.tensor):
            message = f"scores {shape_of(source)} are broadcast to {shape_of(element.tensor)}"
            raise NearMiss("scores-broadcast", message, element.tensor)
        return self.read(replace(element, tensor=source))

    def _either(self, element: Element, pairs: list[tuple[relax.Expr, Any]]) -> tuple[Scores, Any]:
        """The scores that lie behind one of several operands, and what goes with it."""
        problem = None
        for source, rest in sorted(pairs, key=lambda pair: not self._has_product(pair[0])):
            try:
                return self._below(element, source), rest
            except NearMiss as found:
                problem = problem or found
        assert problem is not None
        raise problem

    def _has_product(self, source: relax.Expr) -> bool:
        return any(self.graph.call(var)[0] in PRODUCTS for var in sources(self.graph, source))

    def _astype(self, call: relax.Call, element: Element) -> Scores:
        source = call.args[0]
        if dtype_of(source) not in FLOATS:
            raise NearMiss("no-product", f"scores are cast from {dtype_of(source)}", source)
        scores, dtype = self._below(element, source), dtype_of(element.tensor)
        if is_wider(dtype_of(source), dtype) and any(m.fill != -math.inf for m in scores.masks):
            message = f"masked scores are cast from {dtype_of(source)} to {dtype}: a finite number "
            raise NearMiss("cast-after-mask", message + "below its range is -inf", element.tensor)
        return scores

    # Factors.

    def _multiply(self, call: relax.Call, element: Element) -> Scores:
        numbers = [self.graph.fill(arg) for arg in call.args]
        if numbers == [None, None]:
            message = "scores are multiplied by a tensor: a mask, or a factor per head"
            raise NearMiss("scores-multiplied", message, element.tensor)
        scores, factor = (0, numbers[1]) if numbers[0] is None else (1, numbers[0])
        assert factor is not None
        return self._scaled(self._below(element, call.args[scores]), factor, element.tensor)

    def _divide(self, call: relax.Call, element: Element) -> Scores:
        divisor = self.graph.fill(call.args[1])
        if divisor is None:
            message = "scores are divided by a tensor that is not one constant number"
            raise NearMiss("scores-multiplied", message, element.tensor)
        factor = 1.0 / divisor if divisor else math.inf
        return self._scaled(self._below(element, call.args[0]), factor, element.tensor)

    def _negative(self, call: relax.Call, element: Element) -> Scores:
        return self._scaled(self._below(element, call.args[0]), -1.0, element.tensor)

    def _scaled(self, scores: Scores, factor: float, binding: relax.Expr) -> Scores:
        if not math.isfinite(factor) or factor == 0.0:
            raise NearMiss("scale-not-finite", f"scores are multiplied by {factor}", binding)
        if factor == 1.0:
            return scores
        keeps_masks = factor > 0 and all(mask.fill == -math.inf for mask in scores.masks)
        if scores.masks and not keeps_masks:
            message = f"scores are multiplied by {factor:g} after a mask"
            raise NearMiss("scale-after-mask", message, binding)
        if scores.bound is None:
            return replace(scores, scale=scores.scale * factor)
        if factor < 0:
            raise NearMiss("softcap-negative", f"{factor:g} · tanh(scores)", binding)
        return replace(scores, bound=scores.bound * factor)

    def _tanh(self, call: relax.Call, element: Element) -> Scores:
        scores = self._below(element, call.args[0])
        what = "a mask" if scores.masks else "another tanh" if scores.bound is not None else ""
        if what or scores.is_shifted:
            what = what or "their maximum is subtracted"
            raise NearMiss("tanh-after-mask", f"tanh of scores after {what}", element.tensor)
        return replace(scores, bound=1.0)

    # Masks.

    def _add(self, call: relax.Call, element: Element) -> Scores:
        left, right = call.args
        scores, added = self._either(element, [(left, right), (right, left)])
        return self._masked(scores, element, added)

    def _subtract(self, call: relax.Call, element: Element) -> Scores:
        left, right = call.args
        scores = self._below(element, left)
        row = broadcast_element(right, element)
        if self.points.reduces("max", row, replace(element, tensor=left), self.axis):
            return replace(scores, is_shifted=True)  # a stabilisation that softmax does itself
        return self._masked(scores, element, right, sign=-1)

    def _where(self, call: relax.Call, element: Element) -> Scores:
        condition, yes, no = call.args
        scores, (other, hides) = self._either(element, [(yes, (no, False)), (no, (yes, True))])
        fill = self.graph.fill(other)
        if fill is None:
            message = "where() selects between scores and a tensor that is not one constant number"
            raise NearMiss("fill-not-constant", message, element.tensor)
        return self._masked(scores, element, condition, fill=fill, hides=hides)

    def _masked(
        self,
        scores: Scores,
        element: Element,
        tensor: relax.Expr,
        *,
        fill: float | None = None,
        hides: bool = False,
        sign: int = 1,
    ) -> Scores:
        if self._comes_from(tensor, scores.product.result):
            message = "the mask is computed from the scores themselves"
            raise NearMiss("mask-of-scores", message, element.tensor)
        dtype, own = dtype_of(element.tensor), broadcast_element(tensor, element)
        mask = Mask(own, fill, hides, sign, dtype, element.tensor)
        return replace(scores, masks=(*scores.masks, mask))

    def _comes_from(self, tensor: relax.Expr, source: relax.Var) -> bool:
        """Whether `tensor` is computed from `source`, as far as a few dozen bindings show."""
        front, seen = [tensor], {tensor}
        while front and len(seen) < _LONGEST:
            value = self.graph.bound.get(front.pop())
            for var in () if value is None else used_vars(value):
                if var.same_as(source):
                    return True
                if var not in seen:
                    seen.add(var)
                    front.insert(0, var)
        return False
