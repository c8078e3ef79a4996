"""Register a Relax op of ours: its attributes, and its name in TVMScript (`R.sits.<name>`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import tvm.relax.script as relax_script
import tvm.relax.script.parser as relax_parser
from tvm import relax
from tvm.ir import Op, Type
from tvm.ir.op import register_op_attr

Infer = Callable[[relax.Call, relax.BlockBuilder], Type]
Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def register_op(
    name: str,
    infer: Infer,
    builder: Callable[..., relax.Call],
    *,
    legalize: Legalize | None = None,
    validate: Callable[[relax.Call], None] | None = None,
    gradient: Callable | None = None,
) -> Op:
    """Make `name` a pure Relax op that prints, parses, legalizes and is checked.

    Parameters
    ----------
    name : str
        "relax.sits.<short>"; TVMScript calls `builder` as `R.sits.<short>`.
    infer : (call, block builder) -> Type
        The type of the result. A built-in exception it raises reaches the user unchanged; a class
        of ours would arrive as RuntimeError.
    builder : (*args, **attributes) -> Call
        Makes the call from what TVMScript prints: positional arguments, attributes by keyword.
    legalize : (block builder, call) -> Expr, optional
        FLegalize. It may return Relax ops, which LegalizeOps then legalizes.
    validate : (call) -> None, optional
        FValidate, run by `relax.analysis.well_formed`; raises on a bad call.
    gradient : (variable, call, output gradient, block builder) -> list of Expr, optional
        FPrimalGradient, one partial per argument.

    Returns
    -------
    Op
        For `relax.Call(op, args, attributes)`. Registering a name again replaces it.
    """
    attributes = {
        "FInferType": infer,
        "FPurity": True,
        "FLegalize": legalize,
        "FValidate": validate,
        "FPrimalGradient": gradient,
    }
    for key, value in attributes.items():
        if value is not None:
            _replace_attr(name, key, value)
    setattr(_namespace(), name.rsplit(".", 1)[1], builder)
    return Op.get(name)


def _replace_attr(name: str, key: str, value: object) -> None:
    if name in Op.list_op_names() and Op.get(name).get_attr(key) is not None:
        Op.get(name).reset_attr(key)
    register_op_attr(name, key, value)


def _namespace() -> SimpleNamespace:
    """`R.sits`: the decorators look it up in one module, `tvm.script.from_source` in the other."""
    if not hasattr(relax_script, "sits"):
        relax_script.sits = relax_parser.sits = SimpleNamespace()
    return relax_script.sits
