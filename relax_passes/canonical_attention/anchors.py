"""Where attention may be: softmax, however it is spelled."""

from __future__ import annotations

from tvm import relax

from relax_passes.canonical_attention.graph import Graph, NearMiss
from relax_passes.canonical_attention.plan import Softmax
from relax_passes.canonical_attention.softmax_forms import quotient, without_logarithm
from relax_passes.canonical_attention.weights import reaches_product


def softmax_of(graph: Graph, var: relax.Var) -> Softmax | None:
    """The softmax that is bound to `var`, or the product divided by its sum, if its weights reach
    a product."""
    try:
        found = _softmax(graph, var)
    except NearMiss:
        return None
    return found if found is not None and reaches_product(graph, found.weights) else None


def _softmax(graph: Graph, var: relax.Var) -> Softmax | None:
    name, call = graph.call(var)
    if name == "nn.softmax":
        return Softmax(var, call.args[0], int(call.attrs.axis) % var.ty.ndim)
    if name == "exp":
        inner, log = graph.call(call.args[0])
        if inner == "nn.log_softmax":
            return Softmax(var, log.args[0], int(log.attrs.axis) % var.ty.ndim)
        return without_logarithm(graph, var, call)
    return quotient(graph, var, call) if name == "divide" else None
