"""Tell an adjoint that `Gradient` made, by whatever rules, from one that was edited by hand.

Of each gradient `<v>_adjoint` three things are compared with an adjoint that is made now: which
other gradients it is computed from, with which constants, and by which arithmetic. Rules may move
the same numbers around in other ops. Inside of quantization, which is what the rules were wrong
about, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import tvm
from tvm import relax

from .._adjoint import bindings_of, primal_name, used_vars
from .._values import Values

# Ops that only move numbers, and what a sum or its gradient may be written as.
_MOVES = (
    "reshape", "broadcast_to", "expand_dims", "squeeze", "permute_dims", "sum", "astype", "ones",
    "zeros", "full", "ones_like", "zeros_like", "full_like", "collapse_sum_to", "collapse_sum_like",
)  # fmt: skip


@dataclass
class Sources:
    """Names of the variables whose gradients a value is computed from; constants, and the names of
    the arithmetic ops, on the way."""

    names: set[str] = field(default_factory=set)
    constants: set[float] = field(default_factory=set)
    ops: set[str] = field(default_factory=set)

    def add(self, other: Sources) -> None:
        self.names |= other.names
        self.constants |= other.constants
        self.ops |= other.ops


def first_difference(
    given: relax.Function,
    given_forward: relax.Function,
    made: relax.Function,
    made_forward: relax.Function,
    sites: set[str],
) -> str | None:
    """The variable whose gradients differ besides quantization, or None.

    `sites` are the names of the results of quantization.
    """
    old_names, new_names = (
        {b.var.name for b in bindings_of(f)} for f in (given_forward, made_forward)
    )
    old = sources_of_gradients(given, old_names - new_names)
    new = sources_of_gradients(made, new_names - old_names)
    touched = _reaching(new, sites)
    for name in {**new, **old}:
        if name not in old and name not in touched:
            return name
        if name in old and (
            name not in new or not _agree(old[name], new[name], name, touched, sites)
        ):
            return name
    return None


def _agree(old: Sources, new: Sources, name: str, touched: set[str], sites: set[str]) -> bool:
    """What quantization passes back directly may be anything; what was lost behind it, nothing."""
    if new.names & sites:
        return old.names <= new.names
    if name in touched and not old.names:
        return True
    return old == new


def sources_of_gradients(func: relax.Function, inner: set[str]) -> dict[str, Sources]:
    """By name of the primal variable; gradients of `inner` variables are seen through."""
    values = Values(func)
    backward: dict[relax.Var, Sources] = {}
    found: dict[str, Sources] = {}
    for binding in bindings_of(func):
        name = primal_name(binding.var.name)
        reads = [v for v in used_vars(binding.value) if v in backward]
        if name is None and not reads:
            continue
        op = values.call(binding.value)[0]
        ops = {op} if op and op not in _MOVES else set()
        sources = Sources(constants=set(_constants(values, binding.value)), ops=ops)
        for var in reads:
            sources.add(backward[var])
        if name is not None and name not in inner:
            sources.names.discard(name)
            found.setdefault(name, Sources()).add(sources)
            sources = Sources({name})
        backward[binding.var] = sources
    return found


def _constants(values: Values, value: relax.Expr) -> Iterator[float]:
    for arg in value.args if isinstance(value, relax.Call) else ():
        if isinstance(values.of(arg), tvm.ir.GenericConst):
            number = values.number(arg)
            yield float("nan") if number is None else number


def _reaching(sources: dict[str, Sources], sites: set[str]) -> set[str]:
    """The names whose gradients are computed, also in many steps, from those of `sites`."""
    reaching = set(sites)
    size = 0
    while len(reaching) != size:
        size = len(reaching)
        reaching |= {name for name, s in sources.items() if s.names & reaching}
    return reaching - sites
