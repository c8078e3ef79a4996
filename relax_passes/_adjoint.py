"""Read `<f>_adjoint` as `relax.transform.Gradient` writes it: which value is whose gradient."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import IRModule, relax

from sits_tvm.diagnostics import Diagnostic, SitsError

SUFFIX = "_adjoint"
_ADJOINT_NAME = re.compile(rf"(.+?){SUFFIX}\d*(?:_out\d*)?$")
_FULL = ("relax.full", "relax.full_like")
_SEED_OPS = ("relax.ones", "relax.ones_like", *_FULL)


@dataclass(frozen=True)
class Adjoint:
    """A forward function and the function that returns (its result, gradients of one output).

    Attributes
    ----------
    name : str
        Of the forward function; the other one is ``<name>_adjoint``.
    forward, function : relax.Function
    bindings : list of relax.Binding
        Of `function`, in order: those of the forward function, then those of the gradients.
    outputs : list of relax.Expr
        What the forward function returns, its parts if that is a tuple.
    gradients : list of (relax.Var, relax.Expr)
        A parameter of `function`, and its gradient.
    seed : relax.Binding or None
        Where the gradient of the differentiated output starts as 1; None if there is no such
        binding, as in an adjoint written by hand.
    """

    name: str
    forward: relax.Function
    function: relax.Function
    bindings: list[relax.Binding]
    outputs: list[relax.Expr]
    gradients: list[tuple[relax.Var, relax.Expr]]
    seed: relax.Binding | None

    def forward_bindings(self) -> list[relax.Binding]:
        """The bindings of `function` before the seed."""
        if self.seed is None:
            return self.bindings[: len(bindings_of(self.forward))]
        names = [binding.var for binding in self.bindings]
        return self.bindings[: names.index(self.seed.var)]

    def target_index(self) -> int:
        """Which output was differentiated: the one that the seed is named after, else the first."""
        target = None if self.seed is None else primal_name(self.seed.var.name)
        names = [identifier(out.name) if isinstance(out, relax.Var) else "" for out in self.outputs]
        return names.index(target) if target in names else 0


def adjoint_names(mod: IRModule) -> list[str]:
    """The functions f of a module that has f_adjoint too."""
    names = {gv.name_hint for gv, f in mod.functions.items() if isinstance(f, relax.Function)}
    return sorted(name for name in names if f"{name}{SUFFIX}" in names)


def read_adjoint(mod: IRModule, name: str, require_grads: Sequence[str] | None = None) -> Adjoint:
    """The pair `name`, ``<name>_adjoint``.

    Parameters
    ----------
    require_grads : sequence of str, optional
        The parameters, in the order of the gradients. By default their names are read from the
        returned variables, ``<parameter>_adjoint_out``; failing that, all parameters.

    Raises
    ------
    SitsError
        If a function is missing, or gradients cannot be told apart.
    """
    forward, function = _function(mod, name), _function(mod, f"{name}{SUFFIX}")
    values = {binding.var: binding.value for binding in bindings_of(function)}
    returned = _fields(function.body.body, values)
    pair = [_fields(part, values) for part in returned] if len(returned) == 2 else []
    if len(pair) != 2:
        message = f"{name}{SUFFIX} returns {function.ret_ty}, not (outputs, (gradients, …))"
        help_ = "make it with sits_tvm.differentiate or relax.transform.Gradient"
        found = Diagnostic.error("adjoint-result", message, function=name + SUFFIX, help=help_)
        raise SitsError([found])
    gradients = pair[1]
    params = _parameters_of(name, function, gradients, require_grads)
    bindings = bindings_of(function)
    return Adjoint(
        name, forward, function, bindings, pair[0], list(zip(params, gradients, strict=True)),
        _seed(forward, bindings),
    )  # fmt: skip


def bindings_of(func: relax.Function) -> list[relax.Binding]:
    """All bindings of the blocks of a function, in order."""
    return [binding for block in func.body.blocks for binding in block.bindings]


def bodies_of(body: relax.SeqExpr) -> Iterator[relax.SeqExpr]:
    """A body and those of the branches in it."""
    yield body
    for block in body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from bodies_of(binding.value.true_branch)
                yield from bodies_of(binding.value.false_branch)


def used_vars(value: relax.Expr) -> Iterator[relax.Var]:
    """The variables that an expression of normal form reads."""
    if isinstance(value, relax.Var):
        yield value
    elif isinstance(value, relax.Call):
        for arg in (value.op, *value.args):
            yield from used_vars(arg)
    elif isinstance(value, relax.Tuple):
        for part in value.fields:
            yield from used_vars(part)
    elif isinstance(value, relax.TupleGetItem):
        yield from used_vars(value.tuple_value)
    elif isinstance(value, relax.If | relax.Function):
        yield from relax.analysis.free_vars(value)


def identifier(name: str) -> str:
    """A name as BlockBuilder makes names: dots and the like are underscores."""
    return re.sub(r"\W", "_", name)


def primal_name(adjoint: str) -> str | None:
    """The `identifier` of the variable whose gradient this variable holds, by its name."""
    found = _ADJOINT_NAME.match(adjoint)
    return identifier(found[1]) if found else None


def _function(mod: IRModule, name: str) -> relax.Function:
    functions = {gv.name_hint: f for gv, f in mod.functions.items()}
    found = functions.get(name)
    if isinstance(found, relax.Function) and isinstance(found.body, relax.SeqExpr):
        return found
    message = f"the module has no Relax function {name}; it holds {', '.join(sorted(functions))}"
    help_ = "make <func>_adjoint with sits_tvm.differentiate(mod, func)"
    raise SitsError([Diagnostic.error("no-adjoint", message, function=name, help=help_)])


def _fields(expr: relax.Expr, values: dict[relax.Var, relax.Expr]) -> list[relax.Expr]:
    """The parts of a tuple, however it is bound; a tensor is its own only part."""
    while isinstance(expr, relax.Var) and isinstance(expr.ty, tvm.ir.TupleType):
        if expr not in values:
            break
        expr = values[expr]
    return list(expr.fields) if isinstance(expr, relax.Tuple) else [expr]


def _parameters_of(
    name: str,
    function: relax.Function,
    gradients: Sequence[relax.Expr],
    require_grads: Sequence[str] | None,
) -> list[relax.Var]:
    params = {param.name: param for param in function.params}
    names = require_grads
    if names is None:
        read = [primal_name(g.name) if isinstance(g, relax.Var) else None for g in gradients]
        known = {identifier(name): name for name in params}
        if all(n in known for n in read) and len(set(read)) == len(read):
            names = [known[str(n)] for n in read]
        elif len(gradients) == len(params):
            names = list(params)
    if names is None or len(names) != len(gradients) or any(n not in params for n in names):
        given = "" if require_grads is None else f" for {', '.join(require_grads)}"
        message = (
            f"cannot tell whose gradients {name}{SUFFIX} returns{given}: it returns "
            f"{len(gradients)}, and its parameters are {', '.join(params)}"
        )
        help_ = "give require_grads=[…], the parameters in the order of the gradients"
        found = Diagnostic.error("gradient-of-what", message, function=name + SUFFIX, help=help_)
        raise SitsError([found])
    return [params[n] for n in names]


def _seed(forward: relax.Function, bindings: Sequence[relax.Binding]) -> relax.Binding | None:
    """The first scalar 1 that the forward function does not make itself."""
    skip = sum(_is_scalar_one(binding) for binding in bindings_of(forward))
    ones = [binding for binding in bindings if _is_scalar_one(binding)]
    return ones[skip] if len(ones) > skip else None


def _is_scalar_one(binding: relax.Binding) -> bool:
    if not isinstance(binding, relax.VarBinding) or not isinstance(binding.value, relax.Call):
        return False
    ty, op = binding.var.ty, binding.value.op
    is_scalar = isinstance(ty, relax.TensorType) and ty.ndim == 0 and "float" in str(ty.dtype)
    name = getattr(op, "name", "")
    if not is_scalar or name not in _SEED_OPS:
        return False
    return name not in _FULL or _is_one(binding.value.args[1])


def _is_one(value: relax.Expr) -> bool:
    return isinstance(value, tvm.ir.GenericConst) and float(value.value.numpy()) == 1
