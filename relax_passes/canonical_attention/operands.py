"""Tensors with given elements, made from what there is by a permutation and a reshape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx
from tvm.relax import op as R

from tir_schedules.tir_nodes import uses

from ..index_analysis.index_domain import Index, integer, is_integer
from .elements import Element, Points, flat, product
from .graph import FLOATS, dtype_of, is_wider, shape_of


@dataclass(frozen=True)
class Recipe:
    """`source`, seen through `views`, permuted, reshaped and broadcast; None: nothing to do."""

    source: relax.Expr
    views: tuple[relax.Call, ...]
    axes: tuple[int, ...] | None
    shape: tuple[Index, ...] | None
    broadcast: tuple[Index, ...] | None

    @property
    def cost(self) -> int:
        """Copies count more than reshapes, which are free at run time."""
        copies = len(self.views) + (self.axes is not None) + 2 * (self.broadcast is not None)
        return 2 * copies + (self.shape is not None)

    def emit(self, bb: relax.BlockBuilder, source: relax.Expr | None = None) -> relax.Expr:
        """The tensor, from `source` in place of the recipe's own."""
        result = self.source if source is None else source
        for view in self.views:
            result = bb.emit(relax.Call(view.op, [result, *view.args[1:]], view.attrs))
        if self.axes is not None:
            result = bb.emit(R.permute_dims(result, list(self.axes)))
        if self.shape is not None:
            result = bb.emit(R.reshape(result, list(self.shape)))
        if self.broadcast is not None:
            result = bb.emit(R.broadcast_to(result, list(self.broadcast)))
        return result


def recipe(
    points: Points,
    element: Element,
    axes: Sequence[tirx.Var],
    extents: Sequence[Index],
    views: tuple[relax.Call, ...] = (),
    whole: relax.Expr | None = None,
) -> Recipe | None:
    """How to make the tensor T[axes] = `element`, of all elements of the element's tensor.

    None where a permutation, a reshape and a broadcast do not do it. `views` of the tensor `whole`
    compute the element's tensor anew.
    """
    is_equal, source = points.domain.is_equal, shape_of(element.tensor)
    used = [element.depends_on(axis) for axis in axes]
    shape = [e if use else integer(1) for e, use in zip(extents, used, strict=True)]
    order = _order(element, axes, source)
    permuted = source if order is None else [source[i] for i in order]
    indices = element.indices if order is None else [element.indices[i] for i in order]
    own = [axis if use else integer(0) for axis, use in zip(axes, used, strict=True)]
    domain = points.domain
    if not is_equal(flat(indices, permuted, domain), flat(own, shape, domain)):
        return None
    if not is_equal(product(permuted), product(shape)):
        return None
    return Recipe(
        element.tensor if whole is None else whole,
        views,
        None if order is None else tuple(order),
        None if points.are_equal(permuted, shape) else tuple(shape),
        None if points.are_equal(shape, extents) else tuple(extents),
    )


def _order(element: Element, axes: Sequence[tirx.Var], source: Sequence[Index]) -> list[int] | None:
    """The dimensions of the source in the order of the axes that they follow; None: as they are."""

    def first(i: int) -> int:
        return next((n for n, axis in enumerate(axes) if uses(element.indices[i], axis)), -1)

    ranks = [first(i) for i in range(len(source))]
    proper = [r for r, extent in zip(ranks, source, strict=True) if not is_integer(extent, 1)]
    if proper == sorted(proper):
        return None
    return sorted(range(len(ranks)), key=lambda i: (ranks[i], i))


@dataclass(frozen=True)
class Trail:
    """An operand followed down through views, constant factors and widening casts.

    Attributes
    ----------
    elements : tuple of Element
        The operand's element first, then the same one in each tensor below.
    cut : int
        From here on no factor and no cast lies below.
    factor : float
        Product of the factors, in float64.
    """

    elements: tuple[Element, ...]
    cut: int
    factor: float

    @property
    def base(self) -> Element:
        return self.elements[-1]

    @property
    def dtype(self) -> str:
        return dtype_of(self.base.tensor)

    def at(self, points: Points, values: dict[tirx.Var, Index]) -> Trail:
        return replace(self, elements=tuple(points.at(e, values) for e in self.elements))


def trail(points: Points, element: Element) -> Trail:
    """`Trail` of an operand of the score product."""
    elements, cut, factor = [points.simplified(element)], 0, 1.0
    while True:
        below = points.step(elements[-1])
        if below is None:
            source, number = _factor_or_cast(points, elements[-1].tensor)
            if source is None:
                return Trail(tuple(elements), cut, factor)
            below, factor, cut = (
                replace(elements[-1], tensor=source),
                factor * number,
                len(elements),
            )
        elements.append(below)


def views_of(points: Points, element: Element) -> Trail:
    """A trail through views alone."""
    return Trail(tuple(points.chain(points.simplified(element))), 0, 1.0)


def _factor_or_cast(points: Points, tensor: relax.Expr) -> tuple[relax.Expr | None, float]:
    name, call = points.graph.call(tensor)
    if name == "astype" and dtype_of(call.args[0]) in FLOATS:
        is_widened = is_wider(dtype_of(tensor), dtype_of(call.args[0]))
        return (call.args[0] if is_widened else None), 1.0
    if name == "negative":
        return call.args[0], -1.0
    pairs = {"multiply": [(0, 1), (1, 0)], "divide": [(0, 1)]}.get(name, [])
    for source, other in pairs:
        number = points.graph.fill(call.args[other])
        if number and abs(number) < float("inf") and points.same_shape(call.args[source], tensor):
            return call.args[source], number if name == "multiply" else 1.0 / number
    return None, 1.0


def pick(
    points: Points, found: Trail, axes: Sequence[tirx.Var], extents: Sequence[Index]
) -> Recipe | None:
    """The cheapest recipe for T[axes] = the trail's element over its factor; deepest of equals."""
    recipes = []
    for place, element in enumerate(found.elements):
        views = _views_above(points, found, place)
        if views is not None:
            whole = element.tensor if place >= found.cut else found.elements[found.cut].tensor
            recipes.append(recipe(points, element, axes, extents, views, whole))
    known = [r for r in reversed(recipes) if r is not None]
    return min(known, key=lambda r: r.cost, default=None)


def _views_above(points: Points, found: Trail, place: int) -> tuple[relax.Call, ...] | None:
    """The views that make the tensor at `place` from the one at the cut; None: not all known."""
    of, views = points.graph.of, []
    for n in reversed(range(place, found.cut)):
        tensor, below = found.elements[n].tensor, found.elements[n + 1].tensor
        if _factor_or_cast(points, tensor)[0] is not None:
            continue
        name, call = points.graph.call(tensor)
        if not name or not of(call.args[0]).same_as(of(below)):
            return None
        views.append(call)
    return tuple(views)
