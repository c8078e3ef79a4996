"""The static walk over an adjoint: where the path of a gradient ends, narrows or changes type.

Every step visits each binding once, so the walk is linear in the number of bindings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import tvm
from tvm import relax

from sits_tvm.diagnostics import Diagnostic

from ._adjoint import SUFFIX, Adjoint, identifier, primal_name, used_vars
from ._gradient_cuts import find_cuts

_DIFFERENTIATE = "run FixQuantizeGradient, or sits_tvm.differentiate(), which runs it for you"


def walk_gradients(adjoint: Adjoint) -> list[Diagnostic]:
    """Everything that is wrong with the paths from the loss to the gradients of `adjoint`."""
    return [
        *_integer_parameters(adjoint),
        *_cut_paths(adjoint),
        *_narrowed_paths(adjoint),
        *_wrong_types(adjoint),
    ]


def _integer_parameters(adjoint: Adjoint) -> Iterator[Diagnostic]:
    for param, _ in adjoint.gradients:
        if _bits(param) == 0:
            message = f"`{param.name}` is {param.ty}: only floats have gradients"
            help_ = "leave it out of require_grads"
            where = {"function": adjoint.name, "binding": param.name}
            yield Diagnostic.error("gradient-of-integer", message, help=help_, **where)


def _cut_paths(adjoint: Adjoint) -> Iterator[Diagnostic]:
    """Gradients that do not depend on the seed, with the place where the path ends."""
    carried = _depend_on_seed(adjoint)
    below, used = _first_with_gradient(adjoint, carried)
    constant = [
        param
        for param, gradient in adjoint.gradients
        if _bits(param) and not any(var in carried for var in used_vars(gradient))
    ]
    ends = {param: below[param] for param in constant if param in used}
    cuts = find_cuts(adjoint.forward_bindings(), ends)
    for binding, error in cuts.failures:
        yield _failed_rule(adjoint, binding, error)
    for param in constant:
        if param in used:
            yield _cut(adjoint, param, cuts.places.get(param), ends[param])
        else:
            message = f"the loss does not depend on `{param.name}`, so its gradient is zero"
            where = {"function": adjoint.name, "binding": param.name}
            yield Diagnostic.warning("gradient-unused", message, **where)


def _cut(
    adjoint: Adjoint, param: relax.Var, found: relax.Binding | None, end: relax.Binding
) -> Diagnostic:
    """The error at the op between `param` and `end` whose gradient rule gives nothing."""
    name = (found or end).var.name
    where = f"at `{name}`" if found is not None else f"between `{param.name}` and `{name}`"
    message = f"the gradient of `{param.name}` is cut {where}: what arrives is a constant"
    return _error("gradient-cut", message, adjoint, name, found or end)


def _failed_rule(adjoint: Adjoint, binding: relax.Binding, error: Exception) -> Diagnostic:
    """The note at an op of which nobody can tell whether a gradient passes."""
    name, said = binding.var.name, (str(error).splitlines() or [""])[0]
    message = (
        f"the gradient rule of {binding.value.op.name} raises {type(error).__name__}: {said}; "
        f"a gradient that is cut at `{name}` is reported at another op"
    )
    help_ = "let the rule (FPrimalGradient) return one partial for each argument"
    where = _where(adjoint, name, binding)
    return Diagnostic.note("gradient-rule-failed", message, help=help_, **where)


def _depend_on_seed(adjoint: Adjoint) -> set[relax.Var]:
    """The variables that carry a gradient; without a seed, all that depend on a parameter."""
    start = [adjoint.seed.var] if adjoint.seed is not None else list(adjoint.function.params)
    carried = set(start)
    for binding in adjoint.bindings:
        if any(var in carried for var in used_vars(binding.value)):
            carried.add(binding.var)
    return carried


def _first_with_gradient(
    adjoint: Adjoint, carried: set[relax.Var]
) -> tuple[dict[relax.Var, relax.Binding], set[relax.Var]]:
    """For a variable the next op towards the loss that has a gradient; and what the loss uses."""
    with_gradient = {primal_name(var.name) for var in carried}
    below: dict[relax.Var, relax.Binding] = {}
    used = set(_loss_vars(adjoint))
    for binding in reversed(adjoint.forward_bindings()):
        if binding.var not in used:
            continue
        has_gradient = identifier(binding.var.name) in with_gradient
        end = binding if has_gradient else below.get(binding.var, binding)
        for var in used_vars(binding.value):
            used.add(var)
            below[var] = end
    return below, used


def _loss_vars(adjoint: Adjoint) -> Iterator[relax.Var]:
    """The variable that was differentiated; all of the forward function if that is not known."""
    target = primal_name(adjoint.seed.var.name) if adjoint.seed is not None else None
    named = [b.var for b in adjoint.forward_bindings() if identifier(b.var.name) == target]
    return iter(named or [b.var for b in adjoint.forward_bindings()])


def _narrowed_paths(adjoint: Adjoint) -> Iterator[Diagnostic]:
    """Gradients held in an integer, or in fewer bits than the value they belong to."""
    carried = _depend_on_seed(adjoint)
    wanted = _wanted_bits(adjoint)
    reached = _parameters_reached(adjoint)
    for binding in adjoint.bindings:
        var = binding.var
        if var not in carried or var not in wanted or not isinstance(var.ty, relax.TensorType):
            continue
        if _bits(var) < max(wanted[var], 1):
            code = "gradient-truncated" if _bits(var) == 0 else "gradient-narrowed"
            verb = "passes through" if _bits(var) == 0 else "is narrowed to"
            message = f"the gradient of `{reached[var]}` {verb} {var.ty.dtype} at `{var.name}`"
            yield _error(code, message, adjoint, var.name, binding)


def _wanted_bits(adjoint: Adjoint) -> dict[relax.Var, int]:
    """Bits that each live variable must have: of its own value, else of what reads it."""
    primal = _unique({*adjoint.function.params, *(b.var for b in adjoint.forward_bindings())})
    wanted: dict[relax.Var, int] = {}
    for param, gradient in adjoint.gradients:
        for var in used_vars(gradient):
            wanted[var] = max(wanted.get(var, 0), _bits(param))
    for binding in reversed(adjoint.bindings):
        if binding.var not in wanted:
            continue
        own = primal.get(primal_name(binding.var.name) or "")
        bits = _bits(own) if own is not None and _bits(own) else wanted[binding.var]
        wanted[binding.var] = bits
        for var in used_vars(binding.value):
            wanted[var] = max(wanted.get(var, 0), bits)
    return wanted


def _parameters_reached(adjoint: Adjoint) -> dict[relax.Var, str]:
    """For each variable the first parameter whose gradient reads it."""
    reached: dict[relax.Var, str] = {}
    for param, gradient in adjoint.gradients:
        for var in used_vars(gradient):
            reached.setdefault(var, param.name)
    for binding in reversed(adjoint.bindings):
        if binding.var in reached:
            for var in used_vars(binding.value):
                reached.setdefault(var, reached[binding.var])
    return reached


def _wrong_types(adjoint: Adjoint) -> Iterator[Diagnostic]:
    """Gradients whose shape is not that of their value; `Gradient` does not check partials."""
    primal = _unique({*adjoint.function.params, *(b.var for b in adjoint.forward_bindings())})
    for binding in adjoint.bindings:
        own = primal.get(primal_name(binding.var.name) or "")
        if own is not None and not _same_shape(own.ty, binding.var.ty):
            message = (
                f"the gradient of `{own.name}` has type {binding.var.ty} at "
                f"`{binding.var.name}`, where {own.ty} is wanted"
            )
            yield _error("gradient-shape", message, adjoint, binding.var.name, binding)
    for param, gradient in adjoint.gradients:
        if not isinstance(gradient, relax.Var) and not _same_shape(param.ty, gradient.ty):
            message = f"the gradient of `{param.name}` has type {gradient.ty}, not {param.ty}"
            yield _error("gradient-shape", message, adjoint, param.name, None)


def _same_shape(one: tvm.ir.Type, other: tvm.ir.Type) -> bool:
    if not isinstance(one, relax.TensorType) or not isinstance(other, relax.TensorType):
        return isinstance(one, tvm.ir.TupleType) == isinstance(other, tvm.ir.TupleType)
    if not isinstance(one.shape, relax.ShapeExpr) or not isinstance(other.shape, relax.ShapeExpr):
        return one.ndim == other.ndim
    a, b = list(one.shape), list(other.shape)
    prove = tvm.sym.Analyzer().can_prove_equal
    return len(a) == len(b) and all(x.same_as(y) or prove(x, y) for x, y in zip(a, b, strict=True))


def _unique(variables: Iterable[relax.Var]) -> dict[str, relax.Var]:
    """By `identifier`, without those that several variables have."""
    found = list(variables)
    counts = Counter(identifier(var.name) for var in found)
    names = {identifier(var.name): var for var in found}
    return {name: var for name, var in names.items() if counts[name] == 1}


def _bits(var: relax.Var) -> int:
    """Width of a float; 0 for anything else."""
    if not isinstance(var.ty, relax.TensorType) or "float" not in str(var.ty.dtype):
        return 0
    return int(tvm.DataType(str(var.ty.dtype)).bits)


def _error(
    code: str, message: str, adjoint: Adjoint, at: str, binding: relax.Binding | None
) -> Diagnostic:
    return Diagnostic.error(code, message, help=_DIFFERENTIATE, **_where(adjoint, at, binding))


def _where(adjoint: Adjoint, at: str, binding: relax.Binding | None) -> dict[str, str]:
    lines = str(binding or "").splitlines()
    ir = "\n".join(line for line in lines if line.startswith(f"{at}:"))
    return {"function": f"{adjoint.name}{SUFFIX}", "binding": at, "ir": ir}
