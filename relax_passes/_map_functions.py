"""Apply a mutator to every Relax function of a module."""

from __future__ import annotations

from collections.abc import Callable

from tvm import IRModule, relax


def map_functions(
    mod: IRModule, visit: Callable[[str, relax.Function], relax.Function]
) -> IRModule:
    """A module with `visit(name, function)` for each Relax function; `mod` stays as it is.

    The return type is inferred anew where the function changed.
    """
    changed = {}
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function):
            new = visit(gv.name_hint, func)
            if not new.same_as(func):
                changed[gv] = relax.Function(new.params, new.body, None, func.is_pure, new.attrs)
    if not changed:
        return mod
    result = mod.clone()
    for gv, func in changed.items():
        result[gv] = func
    return result
