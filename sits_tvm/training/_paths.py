"""Which variables carry a gradient from the loss to the parameters, and what stands in its way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir import Op

from relax_passes.gradients import ZERO_GRADIENT, rule_of

from ..diagnostics import Diagnostic

# Arguments that choose elements: their value has no derivative.
_INDEX_ARGUMENTS = {
    "relax.take": (1,),
    "relax.where": (0,),
    "relax.full_like": (0,),
    "relax.gather_elements": (1,),
    "relax.scatter_elements": (1,),
    "relax.sits.take_backward": (1,),
    "relax.sits.int4_take": (0,),
    "relax.nn.nll_loss": (1,),
}


@dataclass(frozen=True)
class Paths:
    """Attributes
    ----------
    name : str
        Of the function.
    bindings : list of Binding
    active : set of Var
        Those whose value depends on a required parameter through derivatives.
    reached : set of Var
        Those of them that the target depends on through derivatives: they get adjoints.
    used : set of Var
        All that the target depends on in any way.
    """

    name: str
    bindings: list[relax.expr.Binding]
    active: set[relax.Var]
    reached: set[relax.Var]
    used: set[relax.Var]


def find_paths(
    name: str, bindings: list[relax.expr.Binding], sources: Iterable[relax.Var], target: relax.Var
) -> Paths:
    active = _active(bindings, sources)
    reached, used = {target} & active, {target}
    for binding in reversed(bindings):
        if binding.var in used:
            used.update(relax.analysis.free_vars(binding.value))
        if binding.var in reached:
            reached.update(var for var in _carriers(binding.value) if var in active)
    return Paths(name, bindings, active, reached, used)


def _active(bindings: list[relax.expr.Binding], sources: Iterable[relax.Var]) -> set[relax.Var]:
    active = set(sources)
    for binding in bindings:
        if _can_carry(binding.var.ty) and any(v in active for v in _carriers(binding.value)):
            active.add(binding.var)
    return active


def _can_carry(ty: tvm.ir.Type) -> bool:
    """Not a bool, which a comparison makes. An integer may be a quantized code."""
    if isinstance(ty, relax.TupleType):
        return any(_can_carry(field) for field in ty.fields)
    return isinstance(ty, relax.TensorType) and str(ty.dtype) != "bool"


def _carriers(value: relax.Expr) -> Iterator[relax.Var]:
    """The variables that `value` has a derivative in."""
    if isinstance(value, relax.Var):
        yield value
    elif isinstance(value, relax.Tuple):
        for field in value:
            yield from _carriers(field)
    elif isinstance(value, relax.TupleGetItem):
        yield from _carriers(value.tuple_value)
    elif isinstance(value, relax.If):
        yield from relax.analysis.free_vars(value)
    elif isinstance(value, relax.Call):
        name = getattr(value.op, "name", "") if isinstance(value.op, Op) else ""
        skipped = (
            range(len(value.args)) if name in ZERO_GRADIENT else _INDEX_ARGUMENTS.get(name, ())
        )
        for i, arg in enumerate(value.args):
            if i not in skipped:
                yield from _carriers(arg)


def obstacles(paths: Paths) -> Iterator[Diagnostic]:
    """An error for every binding on a path that has no gradient."""
    for binding in paths.bindings:
        if binding.var in paths.reached:
            found = _obstacle(binding.value, binding.var)
            if found is not None:
                yield _at(paths.name, binding, *found)


def _obstacle(value: relax.Expr, var: relax.Var) -> tuple[str, str, str] | None:
    """(code, message, help) or None."""
    if isinstance(value, relax.If):
        advice = "compute both branches and choose with R.where"
        return "gradient-control-flow", "an If on the way to the loss has no gradient", advice
    if not isinstance(value, relax.Call):
        return None
    if not isinstance(value.op, Op):
        advice = "write what it computes in Relax ops, in a function that does not call itself"
        return "gradient-of-call", f"a call of {value.op} has no gradient", advice
    if _is_truncation(value, var):
        message = f"a cast of {value.args[0].ty.dtype} to {var.ty.dtype} has no gradient"
        advice = "write R.sits.fake_quantize(x, scale, …), which rounds with a straight-through "
        return "gradient-through-integer", message, advice + "gradient"
    if rule_of(value.op) is not None:
        return None
    shown = value.op.name.removeprefix("relax.")
    return "gradient-missing", f"R.{shown} has no gradient", _ADVICE.get(shown, _REGISTER)


_REGISTER = "write it with ops that have one, or register FPrimalGradient for it"
_ADVICE = {
    "nn.attention": "write R.sits.attention(q, k, v, …), which has one",
    "nn.attention_bias": "write R.sits.attention(q, k, v, bias, …), which has one",
    "nn.dropout": "multiply by a mask that is an argument of the function, and divide by its mean",
    "call_tir": "differentiate before LegalizeOps; write what the kernel computes in Relax ops",
}


def _is_truncation(call: relax.Call, var: relax.Var) -> bool:
    is_cast = call.op == Op.get("relax.astype")
    return is_cast and is_float(call.args[0].ty) and not is_float(var.ty)


def is_float(ty: tvm.ir.Type) -> bool:
    return isinstance(ty, relax.TensorType) and str(ty.dtype).startswith(("float", "bfloat"))


def cuts(paths: Paths, param: relax.Var) -> list[Diagnostic]:
    """Errors for the bindings that end every path from `param` to the target; [] if there is no
    dependence at all."""
    if param not in paths.used:
        return []
    active = _active(paths.bindings, [param])
    found = []
    for binding in paths.bindings:
        reads = relax.analysis.free_vars(binding.value)
        if binding.var in paths.used - active and any(var in active for var in reads):
            message = f"the gradient of `{param.name}` is zero: it is cut at `{binding.var.name}`"
            advice = "leave the parameter out of require_grads, or write a differentiable op there"
            found.append(_at(paths.name, binding, "gradient-cut", message, advice))
    return found


def _at(
    function: str, binding: relax.expr.Binding, code: str, message: str, advice: str
) -> Diagnostic:
    shown = f"{binding.var.name}: {binding.var.ty} = {binding.value}"
    where = {"function": function, "binding": binding.var.name, "ir": shown}
    return Diagnostic.error(code, message, help=advice, **where)
