"""Where attention may be: softmax, however it is spelled."""

from __future__ import annotations

from tvm import relax

from relax_passes.canonical_attention.elements import Element, Points, broadcast_element
from relax_passes.canonical_attention.graph import Graph, NearMiss
from relax_passes.canonical_attention.plan import Softmax
from relax_passes.canonical_attention.weights import reaches_product


def softmax_of(graph: Graph, var: relax.Var) -> Softmax | None:
    """The softmax that is bound to `var`, if its weights reach a product."""
    found = _softmax(graph, var)
    return found if found is not None and reaches_product(graph, var) else None


def _softmax(graph: Graph, var: relax.Var) -> Softmax | None:
    name, call = graph.call(var)
    if name == "nn.softmax":
        return Softmax(var, call.args[0], int(call.attrs.axis) % var.ty.ndim)
    if name == "exp":
        inner, log = graph.call(call.args[0])
        if inner == "nn.log_softmax":
            return Softmax(var, log.args[0], int(log.attrs.axis) % var.ty.ndim)
    return _decomposed(graph, var, call) if name == "divide" else None


def _decomposed(graph: Graph, var: relax.Var, divide: relax.Call) -> Softmax | None:
    """exp(x) / sum(exp(x)); the maximum is subtracted from x, or not."""
    top, bottom = divide.args
    name, exp = graph.call(top)
    if name != "exp":
        return None
    try:
        points = Points(graph)
        whole = Element(top, points.axes_of(top, "x"))
        below = broadcast_element(bottom, whole)
        axes = (n for n, x in enumerate(whole.indices) if points.reduces("sum", below, whole, x))
        axis = next(axes, None)
    except NearMiss:
        return None
    return None if axis is None else Softmax(var, exp.args[0], axis)
