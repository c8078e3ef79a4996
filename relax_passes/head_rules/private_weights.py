"""Whether an attention may change its weights: nothing else reads them or what they make."""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst, IRModule

from .attention_projections import AttentionWeights, FunctionUses


def reason_against(site: AttentionWeights, uses: FunctionUses, mod: IRModule) -> str | None:
    """Who else reads the weights of `site`, or q, k, v on their way; None for nobody."""
    inside = set().union(*(trace.inside for trace in site.traces.values()))
    inside |= {site.variable, site.product}
    leaves = [leaf.source for trace in site.traces.values() for leaf in trace.leaves]
    for value in sorted(inside - {site.variable, site.product}, key=lambda v: v.name):
        if _outside(value, inside, uses):
            others = _others(value, inside, uses)
            return f"`{value.name}`, on the way to the attention, is also read by {others}"
    for source in leaves:
        shown = getattr(source, "name", "a constant")
        if _outside(source, inside, uses):
            return f"`{shown}` is tied: {_others(source, inside, uses)} reads it, too"
        functions = [] if isinstance(source, GenericConst) else _functions_with(shown, site, mod)
        if functions:
            return f"`{shown}` is also a weight of {', '.join(functions)}"
    return None


def _outside(
    value: relax.Expr, inside: set[relax.Var], uses: FunctionUses
) -> list[relax.Var | None]:
    return [reader for reader in uses.readers.get(value, []) if reader not in inside]


def _others(value: relax.Expr, inside: set[relax.Var], uses: FunctionUses) -> str:
    readers = _outside(value, inside, uses)
    return ", ".join("the result" if r is None else f"`{r.name}`" for r in readers[:3])


def _functions_with(name: str, site: AttentionWeights, mod: IRModule) -> list[str]:
    return [
        gvar.name_hint
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function)
        and gvar.name_hint != site.function
        and any(argument.name == name for argument in func.params)
    ]
