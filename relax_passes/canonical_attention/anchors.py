"""Where attention may be: softmax, in many spellings, and exponentials that are summed."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax

from .graph import Graph, NearMiss
from .plan import Softmax
from .reach import PRODUCTS, VIEWS, products_above, reaches
from .softmax_forms import quotient, without_logarithm


def softmaxes_of(graph: Graph) -> list[Softmax]:
    """The softmaxes whose weights reach a product, or whose scores are of two activations."""
    return [
        one
        for one in all_softmaxes(graph)
        if reaches(graph, one.weights, PRODUCTS) or products_above(graph, one.scores)
    ]


def all_softmaxes(graph: Graph) -> Iterator[Softmax]:
    found = (_softmax(graph, b.var) for b in graph.bindings if not graph.is_copy(b.var))
    return (one for one in found if one is not None)


def _softmax(graph: Graph, var: relax.Var) -> Softmax | None:
    name, call = graph.call(var)
    if name == "nn.softmax":
        return Softmax(var, call.args[0], int(call.attrs.axis) % var.ty.ndim)
    try:
        if name == "exp":
            inner, log = graph.call(call.args[0])
            if inner == "nn.log_softmax":
                return Softmax(var, log.args[0], int(log.attrs.axis) % var.ty.ndim)
            return without_logarithm(graph, var, call)
        return quotient(graph, var, name, call) if name in ("divide", "multiply") else None
    except NearMiss:
        return None  # of tensors of unknown shape: as `unnormalised` if they are exponentials


def unnormalised(graph: Graph, softmaxes: list[Softmax]) -> Iterator[tuple[relax.Var, NearMiss]]:
    """Exponentials of scores of two activations that are multiplied, or divided by a sum, and make
    no softmax."""
    known = {var for one in softmaxes for var in products_above(graph, one.scores)}
    for var in (b.var for b in graph.bindings if not graph.is_copy(b.var)):
        name, call = graph.call(var)
        if name != "exp" or not _leads_on(graph, var):
            continue
        products = products_above(graph, call.args[0])
        if products and known.isdisjoint(products):
            known.update(products)
            yield var, _why_not(graph, var)


def _leads_on(graph: Graph, exp: relax.Var) -> bool:
    """A logarithm of a sum alone, as in losses, does not."""
    is_summed_alone = {graph.call(b.var)[0] for b in graph.readers.get(exp, ())} == {"sum"}
    is_divided = not is_summed_alone and reaches(graph, exp, ("sum",))
    return is_divided or reaches(graph, exp, PRODUCTS)


def _why_not(graph: Graph, exp: relax.Var) -> NearMiss:
    """With the first reader of the exponentials or of their sum that a softmax has not."""
    odd, front = [], [exp]
    while front:
        readers = [b.var for var in front for b in graph.readers.get(var, ())]
        names = {var: graph.call(var)[0] for var in readers}
        odd += [var for var in readers if names[var] not in ("sum", "divide", *PRODUCTS, *VIEWS)]
        front = [var for var in readers if names[var] in ("sum", *VIEWS)]
    if not odd:
        message = "exponentials of scores are not divided by their sum"
        return NearMiss("softmax-form", message, exp)
    where = next((var for var in odd if graph.call(var)[0] != "multiply"), odd[0])
    message = f"exponentials of scores, or their sum, go through {graph.words(where)}"
    return NearMiss("softmax-form", message, where)
