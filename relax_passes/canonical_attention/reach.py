"""What scores come from and where weights go, before any of it is understood: which softmaxes are
reported if they are not recognised."""

from __future__ import annotations

from collections.abc import Collection

import tvm_ffi
from tvm import relax

from .._adjoint import used_vars
from .graph import Graph

PRODUCTS = ("matmul", "einsum")
VIEWS = (
    *("reshape", "flatten", "permute_dims", "expand_dims", "squeeze", "broadcast_to"),
    "strided_slice",
)
_FARTHEST = 64  # variables looked at above scores
_LONGEST = 16  # bindings between a softmax and its product


def reaches(graph: Graph, start: relax.Var, ops: Collection[str]) -> bool:
    """Whether views and ops that keep the shape lead from `start` to one of `ops`."""
    seen, front = {start}, [start]
    for _ in range(_LONGEST):
        pairs = [(var, b.var) for var in front for b in graph.readers.get(var, ())]
        names = [graph.call(reader)[0] for _, reader in pairs]
        if not set(ops).isdisjoint(names):
            return True
        kept = zip(pairs, names, strict=True)
        front = [r for (var, r), name in kept if r not in seen and _keeps(var, r, name)]
        seen.update(front)
    return False


def products_above(graph: Graph, scores: relax.Expr) -> list[relax.Var]:
    """The products of two activations that `scores` come from; one with weights is none."""
    return [var for var in sources(graph, scores) if _is_of_activations(graph, var)]


def sources(graph: Graph, scores: relax.Expr) -> list[relax.Var]:
    """The products and arguments that `scores` come from, through views and ops that keep the
    shape."""
    front = [scores] if isinstance(scores, relax.Var) else []
    seen, found = set(front), []
    while front and len(seen) < _FARTHEST:
        var = front.pop()
        name, binding = graph.call(var)[0], graph.binding_of.get(var)
        if binding is None or name in PRODUCTS:
            found.append(var)
            continue
        for above in used_vars(binding.value):
            if above not in seen and (not name or _keeps(above, var, name)):
                seen.add(above)
                front.append(above)
    return found


def _is_of_activations(graph: Graph, var: relax.Var) -> bool:
    name, call = graph.call(var)
    if name not in PRODUCTS:
        return False
    operands = call.args if name == "matmul" else getattr(graph.of(call.args[0]), "fields", ())
    return bool(operands) and all(operand in graph.activations for operand in operands)


def _keeps(var: relax.Var, reader: relax.Var, name: str) -> bool:
    return name in VIEWS or tvm_ffi.structural_equal(_shape(var), _shape(reader))


def _shape(var: relax.Var) -> object:
    return getattr(var.ty, "shape", None)
