"""What every entry point requires of a module: that it is one, and has the functions asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import IRModule, relax

from .diagnostics import Diagnostic, SitsError, raise_errors


def check_is_module(mod: Any) -> None:
    """Raise SitsError for anything that is no IRModule."""
    if isinstance(mod, IRModule):
        return
    message = f"expected an IRModule, got a {type(mod).__name__}"
    help_ = "import a model with from_torch, from_pretrained or from_onnx"
    if isinstance(mod, relax.Function):
        help_ = 'give the module that holds it, or IRModule({"main": function})'
    raise SitsError([Diagnostic.error("not-a-module", message, help=help_)])


def check_well_formed(mod: IRModule) -> None:
    """Raise SitsError where a pass would meet what no module may hold."""
    try:
        relax.analysis.well_formed(mod)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        message = f"the module is not well formed: {reason[0]}"
        help_ = "relax.analysis.well_formed(mod) must not raise; relax.BlockBuilder makes such ones"
        raise SitsError([Diagnostic.error("not-well-formed", message, help=help_)]) from error


def check_functions(mod: Any, names: Sequence[Any]) -> None:
    """Raise SitsError with every name that is no Relax function of `mod`, and every wrong
    ``num_input`` of those that are; also if `mod` is no module or `names` is empty."""
    check_is_module(mod)
    functions = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
    help_ = f"its functions are {', '.join(functions)}"
    found = [] if names else [("no function is named: func is empty")]
    for name in names:
        if not isinstance(name, str):
            found.append(f"func is a {type(name).__name__}, not the name of a function")
        elif name not in functions:
            found.append(f"the module has no Relax function {name!r}")
    raise_errors([Diagnostic.error("no-such-function", text, help=help_) for text in found])
    raise_errors([d for name in names for d in num_input_faults(name, functions[name])])


def num_input_faults(name: str, func: relax.Function) -> list[Diagnostic]:
    """An error if the attribute ``num_input`` counts no arguments of `func`."""
    inputs = (func.attrs or {}).get("num_input", 0)
    if isinstance(inputs, int) and 0 <= inputs <= len(func.params):
        return []
    message = f"num_input is {inputs!r}; {name} has {len(func.params)} arguments"
    help_ = "write the number of arguments before the weights"
    return [Diagnostic.error("num-input", message, function=name, help=help_)]
