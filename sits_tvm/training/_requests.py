"""What `differentiate` is asked for: a function, arguments that are floats, a scalar loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm import relax

from ..diagnostics import Diagnostic, SitsError, raise_errors
from ._paths import is_float


def wanted_positions(func: relax.Function, name: str, require_grads: Any) -> list[int]:
    """The positions of the arguments whose gradient is asked for."""
    if require_grads is None:
        first = int((func.attrs or {}).get("num_input", 0))
        return [i for i, p in enumerate(func.params) if i >= first and is_float(p.ty)]
    is_one = isinstance(require_grads, str | relax.Var)
    if not is_one and not isinstance(require_grads, Iterable):
        message = f"require_grads is a {type(require_grads).__name__}: {require_grads!r}"
        help_ = "write the name of an argument, its variable, or a list of these"
        raise SitsError([Diagnostic.error("require-grads", message, function=name, help=help_)])
    asked = [require_grads] if is_one else list(require_grads)
    found: list[int] = []
    faults = []
    for one in asked:
        positions = [i for i, p in enumerate(func.params) if _is_param(p, one)]
        fault = _fault(func, positions, one, found)
        if fault is None:
            found.append(positions[0])
        else:
            faults.append(Diagnostic.error("require-grads", fault[0], function=name, help=fault[1]))
    raise_errors(faults)
    return found


def _is_param(param: relax.Var, one: str | relax.Var) -> bool:
    return param.name == one if isinstance(one, str) else param.same_as(one)


def _fault(
    func: relax.Function, positions: list[int], one: Any, found: list[int]
) -> tuple[str, str] | None:
    shown = one if isinstance(one, str) else getattr(one, "name", repr(one))
    if not positions:
        names = ", ".join(p.name for p in func.params)
        return f"{shown!r} is no argument of the function", f"its arguments are {names}"
    if len(positions) > 1:
        return f"{len(positions)} arguments are named {shown!r}", "give the variable itself"
    ty = func.params[positions[0]].ty
    if not is_float(ty):
        return f"{shown!r} is {ty}: only floats have gradients", "leave it out of require_grads"
    if positions[0] in found:
        return f"{shown!r} is given twice", "leave one out"
    if not isinstance(ty.shape, relax.ShapeExpr):
        return f"{shown!r} is {ty}, of unknown shape", "give it a shape, symbolic or not"
    return None


def check_loss(func: relax.Function, name: str, target_index: int) -> None:
    ty, where = func.ret_ty, "the result"
    if not isinstance(target_index, int):
        what = f"target_index is a {type(target_index).__name__}: {target_index!r}"
        _refuse_loss(name, what, "write the position of the loss in the result")
    if isinstance(ty, relax.TupleType):
        where = f"field {target_index} of the result"
        if not 0 <= target_index < len(ty.fields):
            _refuse_loss(name, f"there is no {where}: it has {len(ty.fields)} fields", "")
        ty = ty.fields[target_index]
    elif target_index != 0:
        _refuse_loss(name, f"target_index={target_index}, but the result is no tuple", "")
    if not is_float(ty) or ty.ndim != 0:
        advice = 'return a float scalar, as R.mean(y) or R.sum(y): R.Tensor((), "float32")'
        _refuse_loss(name, f"the loss must be a float of shape (); {where} is {ty}", advice)


def _refuse_loss(name: str, message: str, advice: str) -> None:
    raise SitsError([Diagnostic.error("loss-not-scalar", message, function=name, help=advice)])
