"""Where the path of a gradient is cut: the op whose gradient rule gives nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.ir import Op

from ._adjoint import used_vars


@dataclass(frozen=True)
class Cuts:
    """`places`: for each parameter the first op up to its end whose gradient rule gives nothing.

    `failures`: the ops whose rule raises, and what; of them nobody can tell.
    """

    places: dict[relax.Var, relax.Binding]
    failures: list[tuple[relax.Binding, Exception]]


def find_cuts(bindings: Sequence[relax.Binding], ends: dict[relax.Var, relax.Binding]) -> Cuts:
    """Where the gradients of the parameters end; `ends` are the last ops where they may.

    Visits each binding once, whatever the number of parameters.
    """
    order = {binding.var: i for i, binding in enumerate(bindings)}
    last = max((order[end.var] for end in ends.values()), default=-1)
    first: dict[relax.Var, int] = {}
    failures: list[tuple[relax.Binding, Exception]] = []
    for binding in reversed(_reached_from(ends, bindings[: last + 1])):
        try:
            nothing = _given_nothing(binding)
        except Exception as error:  # a rule may refuse in any way; then another place is named
            nothing = set()
            failures.append((binding, error))
        for var in used_vars(binding.value):
            own = order[binding.var] if var in nothing else first.get(binding.var, len(bindings))
            first[var] = min(own, first.get(var, own))
    places = {
        param: bindings[first[param]]
        for param, end in ends.items()
        if first.get(param, len(bindings)) <= order[end.var]
    }
    return Cuts(places, failures)


def _reached_from(
    params: Iterable[relax.Var], bindings: Sequence[relax.Binding]
) -> list[relax.Binding]:
    reached, found = set(params), []
    for binding in bindings:
        if any(var in reached for var in used_vars(binding.value)):
            reached.add(binding.var)
            found.append(binding)
    return found


def _given_nothing(binding: relax.Binding) -> set[relax.Var]:
    """The variables for which the gradient rule of an op returns a constant zero."""
    call = binding.value
    if not isinstance(call, relax.Call):
        return set()
    rule = call.op.get_attr("FPrimalGradient") if isinstance(call.op, Op) else None
    if rule is None:
        return set(used_vars(call))
    output = relax.Var("output_gradient", binding.var.ty)
    bb = relax.BlockBuilder()
    with bb.testing_scope(def_vars=[]):
        partials = list(rule(binding.var, call, output, bb))
    pairs = zip(call.args, partials, strict=False)
    return {arg for arg, partial in pairs if isinstance(arg, relax.Var) and _is_nothing(partial)}


def _is_nothing(partial: relax.Expr) -> bool:
    name = getattr(partial.op, "name", "") if isinstance(partial, relax.Call) else ""
    return name in ("relax.grad.no_grad", "relax.zeros", "relax.zeros_like")
