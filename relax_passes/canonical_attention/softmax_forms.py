"""Softmax written as exponentials and their sum: divided at once, behind the values, or by a
logarithm that is subtracted."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from .elements import Element, Points, broadcast_element
from .graph import Graph
from .plan import Divided, Softmax
from .products import product_of


def quotient(graph: Graph, var: relax.Var, name: str, call: relax.Call) -> Softmax | None:
    """exp(x) / sum(exp(x)), or (exp(x) v) / sum(exp(x)); the maximum is subtracted from x, or not.

    Also times 1 / sum. `axis` is None where the sum is not proved to be that of the exponentials
    over one axis.
    """
    points = Points(graph)
    left, right = call.args
    for top, other in [(left, right)] if name == "divide" else [(left, right), (right, left)]:
        if not points.same_shape(top, var):
            continue
        whole = Element(top, points.axes_of(top, "x"))
        below = broadcast_element(other, whole)
        divisor: Element | None = below if name == "divide" else _reciprocal(points, below)
        found = None if divisor is None else _normalised(points, var, whole, divisor)
        if found is not None:
            return found
    return None


def _reciprocal(points: Points, factor: Element) -> Element | None:
    """x, where the factor is 1 / x."""
    *_, deepest = points.chain(factor)
    name, call = points.graph.call(deepest.tensor)
    if name != "divide" or points.graph.fill(call.args[0]) != 1.0:
        return None
    return broadcast_element(call.args[1], deepest)


def _normalised(points: Points, var: relax.Var, whole: Element, below: Element) -> Softmax | None:
    graph = points.graph
    *_, total = points.chain(below)
    if graph.call(total.tensor)[0] != "sum":
        return None
    name, exp = graph.call(whole.tensor)
    if name == "exp":
        axis = _summed_axis(points, below, whole)
        return Softmax(var, exp.args[0], axis, is_stable=_is_stable(points, whole))
    return _behind_values(points, var, whole, below)


def _behind_values(points: Points, var: relax.Var, out: Element, below: Element) -> Softmax | None:
    """The product of exponentials and values, or a view of it, divided by their sum."""
    *_, deepest = points.chain(out)
    product = product_of(points.graph, deepest.tensor)
    if product is None:
        return None
    summed = points.axis("s", product.summed_extent())
    *_, total = points.chain(below)
    for side in (0, 1):
        for element in points.chain(product.element(side, deepest.indices, summed)):
            name, exp = points.graph.call(element.tensor)
            if name == "exp":
                is_sum = points.reduces("sum", below, element, summed)
                axis = [n for n, i in enumerate(element.indices) if i.same_as(summed)]
                found = axis[0] if is_sum and axis else None
                divided = Divided(total.tensor, out.tensor, var)
                return Softmax(
                    element.tensor, exp.args[0], found, _is_stable(points, element), divided
                )
    return None


def _summed_axis(points: Points, row: Element, whole: Element) -> int | None:
    """The axis over which the sum of `whole` is `row`."""
    axes = (n for n, x in enumerate(whole.indices) if points.reduces("sum", row, whole, x))
    return next(axes, None)


def _is_stable(points: Points, power: Element) -> bool:
    """Whether the power is of x - max(x)."""
    name, call = points.graph.call(points.graph.call(power.tensor)[1].args[0])
    if name != "subtract":
        return False
    whole = Element(call.args[0], power.indices)
    row = broadcast_element(call.args[1], whole)
    return any(points.reduces("max", row, whole, axis) for axis in power.indices)


def without_logarithm(graph: Graph, var: relax.Var, exp: relax.Call) -> Softmax | None:
    """exp(x - log(sum(exp(x)))), or exp(x - (c + log(sum(exp(x - c))))) for any c of the row."""
    name, difference = graph.call(exp.args[0])
    if name != "subtract":
        return None
    scores, row = difference.args
    points = Points(graph)
    whole = Element(scores, points.axes_of(scores, "x"))
    if not points.same_shape(scores, var):
        return None
    *_, below = points.chain(broadcast_element(row, whole))
    for log, shift in _logarithms(points, below):
        power = _summed(points, whole, log, shift)
        axis = None if power is None else _summed_axis(points, *power)
        if axis is not None:
            return Softmax(var, scores, axis, is_stable=False)
    return None


def _logarithms(points: Points, row: Element) -> Sequence[tuple[Element, Element | None]]:
    """`row` as log(…), or as log(…) + c."""
    name, call = points.graph.call(row.tensor)
    if name == "log":
        return [(row, None)]
    if name != "add":
        return []
    left, right = (broadcast_element(arg, row) for arg in call.args)
    return [(left, right), (right, left)]


def _summed(
    points: Points, whole: Element, log: Element, shift: Element | None
) -> tuple[Element, Element] | None:
    """The sum in a logarithm and the power exp(x - shift) that it is over, for x = `whole`."""
    graph = points.graph
    *_, log = points.chain(log)
    name, call = graph.call(log.tensor)
    if name != "log":
        return None
    total = Element(call.args[0], log.indices)
    *_, deepest = points.chain(total)
    name, call = graph.call(deepest.tensor)
    if name != "sum":
        return None
    power = call.args[0]
    name, exp = graph.call(power)
    if name != "exp" or not _is_shifted(points, whole, exp.args[0], shift):
        return None
    return total, Element(power, whole.indices)


def _is_shifted(points: Points, whole: Element, x: relax.Expr, shift: Element | None) -> bool:
    """Whether x is `whole` - `shift`."""
    of = points.graph.of
    if shift is None:
        return of(x).same_as(of(whole.tensor))
    name, call = points.graph.call(x)
    if name != "subtract" or not of(call.args[0]).same_as(of(whole.tensor)):
        return False
    *_, subtracted = points.chain(broadcast_element(call.args[1], whole))
    *_, added = points.chain(shift)
    return points.is_same(subtracted, added)
