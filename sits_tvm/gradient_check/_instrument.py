"""The functions under test with more outputs: the values at which the twin must decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import IRModule, relax

from relax_passes._adjoint import SUFFIX, Adjoint, bindings_of, read_adjoint
from relax_passes.lower_attention import LowerAttention

from .twin import Site, sites_of

OUTPUT = -1  # the position of a recorded result, after which come those of arguments


@dataclass(frozen=True)
class Instrumented:
    """A module to compile, and what its functions return beside their results.

    ``<name>`` returns (outputs, recorded), ``<name>_adjoint`` takes the loss scale as one more
    argument and returns (outputs, gradients, recorded). `recorded` of each is the list of
    (site, argument) keys of the recorded arrays; OUTPUT stands for the result of the op.
    """

    mod: IRModule
    adjoint: Adjoint
    forward_keys: list[tuple[int, int]]
    adjoint_keys: list[tuple[int, int]]


def instrument(mod: IRModule, name: str, require_grads: Sequence[str] | None) -> Instrumented:
    """The functions `name` and ``<name>_adjoint`` alone, with the recorded values.

    Where the adjoint repeats the ops of the forward function, its own values are recorded (kernels
    fuse differently in the two, and a last bit may flip a code), otherwise none.
    """
    plain = tvm.transform.Sequential([LowerAttention(), relax.transform.ToNonDataflow()])
    mod = plain(_pair(mod, name))
    adjoint = read_adjoint(mod, name, require_grads)
    forward_sites = sites_of(bindings_of(adjoint.forward))
    adjoint_sites = sites_of(adjoint.forward_bindings())
    repeats = _kinds(forward_sites) == _kinds(adjoint_sites)
    forward_keys, forward_values = _recorded(forward_sites)
    adjoint_keys, adjoint_values = _recorded(adjoint_sites if repeats else [])
    gradients = relax.Tuple([gradient for _, gradient in adjoint.gradients])
    forward = _returning(adjoint.forward, [adjoint.forward.body.body], forward_values)
    backward = _returning(
        _with_loss_scale(adjoint), adjoint.outputs, adjoint_values, gradients=gradients
    )
    out = mod.clone()
    out.update_func(mod.get_global_var(name), forward)
    out.update_func(mod.get_global_var(name + SUFFIX), backward)
    out = relax.transform.ConvertToDataflow()(relax.transform.Normalize()(out))
    return Instrumented(out, adjoint, forward_keys, adjoint_keys)


def _pair(mod: IRModule, name: str) -> IRModule:
    """The two functions, and whatever is no Relax function."""
    kept = {name, name + SUFFIX}
    functions = {
        gv: func
        for gv, func in mod.functions.items()
        if not isinstance(func, relax.Function) or gv.name_hint in kept
    }
    return IRModule(functions, attrs=mod.attrs)


def _kinds(sites: Sequence[Site]) -> list[tuple[str, str]]:
    return [(site.call.op.name, str(site.binding.var.ty)) for site in sites]


def _recorded(sites: Sequence[Site]) -> tuple[list[tuple[int, int]], list[relax.Var]]:
    keys, values = [], []
    for i, site in enumerate(sites):
        parts = list(enumerate(site.call.args))
        if site.is_quantizer:
            parts.append((OUTPUT, site.binding.var))
        for position, part in parts:
            if isinstance(part, relax.Var) and "float" in str(getattr(part.ty, "dtype", "")):
                keys.append((i, position))
                values.append(part)
    return keys, values


def _with_loss_scale(adjoint: Adjoint) -> relax.Function:
    """The gradient starts as the last argument instead of 1; unused where there is no seed."""
    func, seed = adjoint.function, adjoint.seed
    scale = relax.Var("loss_scale", relax.TensorType((), scale_dtype(adjoint)))
    blocks = [
        relax.BindingBlock(
            [relax.VarBinding(b.var, scale) if b.same_as(seed) else b for b in block.bindings]
        )
        for block in func.body.blocks
    ]
    body = relax.SeqExpr(blocks, func.body.body)
    return relax.Function([*func.params, scale], body, func.ret_ty, func.is_pure, func.attrs)


def scale_dtype(adjoint: Adjoint) -> str:
    """The dtype of the loss, and of the loss scale."""
    return "float32" if adjoint.seed is None else str(adjoint.seed.var.ty.dtype)


def _returning(
    func: relax.Function,
    outputs: Sequence[relax.Expr],
    recorded: Sequence[relax.Var],
    gradients: relax.Tuple | None = None,
) -> relax.Function:
    middle = [] if gradients is None else [gradients]
    result = relax.Tuple([relax.Tuple(list(outputs)), *middle, relax.Tuple(list(recorded))])
    result = relax.BlockBuilder().normalize(result)
    body = relax.SeqExpr(func.body.blocks, result)
    attrs = {k: v for k, v in (func.attrs or {}).items() if k != "num_input"}
    made = relax.Function(func.params, body, result.ty, func.is_pure)
    return made.with_attrs(attrs) if attrs else made
