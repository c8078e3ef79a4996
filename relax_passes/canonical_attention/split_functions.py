"""Attention whose softmax is in another function than its products."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import IRModule, relax

from .._inlining import called
from .anchors import all_softmaxes
from .graph import Graph, NearMiss
from .reach import PRODUCTS, products_above, reaches, sources


def softmax_arguments(mod: IRModule) -> dict[str, set[int]]:
    """Which arguments of the functions that others call are scores of a softmax, by name."""
    names = called(mod.functions.values())
    functions = {gv.name_hint: func for gv, func in mod.functions.items()}
    return {
        name: _scores_of(functions[name])
        for name in names
        if isinstance(functions.get(name), relax.Function)
    }


def _scores_of(func: relax.Function) -> set[int]:
    graph, params = Graph(func), list(func.params)
    above = [var for one in all_softmaxes(graph) for var in sources(graph, one.scores)]
    return {params.index(var) for var in above if var in params}


def split_softmaxes(
    graph: Graph, arguments: dict[str, set[int]]
) -> Iterator[tuple[relax.Var, NearMiss]]:
    """Calls of such functions between products."""
    for var, value in ((b.var, b.value) for b in graph.bindings):
        name = getattr(getattr(value, "op", None), "name_hint", "")
        scores = [value.args[n] for n in arguments.get(name, ())]
        if scores and (
            reaches(graph, var, PRODUCTS) or any(products_above(graph, x) for x in scores)
        ):
            message = f"the softmax is in the function `{name}`, its products are not"
            yield var, NearMiss("softmax-in-function", message, var)
