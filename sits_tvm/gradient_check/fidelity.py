"""The report: gradients at INT4 weights against those at float weights, and what explains the gap.

g(Q(w)) - g(w) = H·(Q(w) - w) + O(‖Q(w) - w‖²): a property of the model, not a fault. H is the
Hessian of the loss, its product with a direction v is the gradient of ⟨g, v⟩ (Pearlmutter 1994).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tvm import IRModule, relax
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes._adjoint import SUFFIX

from ..host_run import Compile, Run
from ..training.differentiate import differentiate
from ._instrument import instrument, scale_dtype
from ._torch_values import to_torch
from .measures import measure
from .parameters import roles_of
from .result import FidelityRow
from .twin import Twin

DIRECTIONAL, DIRECTION = "_directional", "direction_"


def fidelity_rows(
    mod: IRModule,
    name: str,
    compile_: Compile,
    args: Mapping[str, np.ndarray],
    *,
    require_grads: Sequence[str] | None = None,
) -> list[FidelityRow]:
    """A row for each parameter of `name` that goes through a fake quantization, at `args`.

    The gradient at INT4 is that of ``<name>_adjoint``; a clipped element has none. The one at float
    is of the same function without these fake quantizations, differentiated anew.
    """
    tested = instrument(mod, name, require_grads)  # what the gate compiles, too
    roles, arrays = roles_of(tested.adjoint.forward), list(args.values())
    names = [param.name for param, _ in tested.adjoint.gradients]
    weights = [n for n in names if roles[n].part == 0]
    if not weights:
        return []
    unscaled = np.array(1.0, scale_dtype(tested.adjoint))
    at_int4 = _gradients(compile_(tested.mod), name, [*arrays, unscaled])
    run = compile_(_curvature(mod, name, weights))
    floats = _gradients(run, name, arrays)
    shifts = _shifts(mod, name, args, {w: roles[w].site or 0 for w in weights})
    directions = [shifts[w][0] for w in weights]
    curved = _gradients(run, name + DIRECTIONAL, [*arrays, *directions])
    return [
        _row(w, roles[w].operator, at_int4[names.index(w)], floats[i], curved[i], shifts[w][1])
        for i, w in enumerate(weights)
    ]


def without_fake_quantize(mod: IRModule, name: str, weights: Sequence[str]) -> IRModule:
    """`mod` without ``<name>_adjoint``, and with `weights` used in float by `name`."""
    others = [gv.name_hint for gv in mod.functions if gv.name_hint != name + SUFFIX]
    out, func = _only(mod, others), mod[name]
    made = _Float(out, [p for p in func.params if p.name in weights]).visit_expr(func)
    out[name] = relax.Function(made.params, made.body, None, func.is_pure, func.attrs)
    return out


def _only(mod: IRModule, names: Sequence[str]) -> IRModule:
    """A module of these functions, and of those that are no Relax function."""
    return IRModule(
        {
            gv: func
            for gv, func in mod.functions.items()
            if gv.name_hint in names or not isinstance(func, relax.Function)
        },
        attrs=mod.attrs,
    )


def _curvature(mod: IRModule, name: str, weights: Sequence[str]) -> IRModule:
    plain = hessian_vector_product(without_fake_quantize(mod, name, weights), name, weights)
    return _only(plain, [name + SUFFIX, name + DIRECTIONAL + SUFFIX])


@mutator
class _Float(PyExprMutator):
    def __init__(self, mod: IRModule, params: Sequence[relax.Var]) -> None:
        super().__init__(mod)
        self.params = list(params)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        is_site = getattr(call.op, "name", "") == "relax.sits.fake_quantize"
        is_weight = is_site and any(call.args[0].same_as(param) for param in self.params)
        return call.args[0] if is_weight else call


def hessian_vector_product(mod: IRModule, name: str, weights: Sequence[str]) -> IRModule:
    """Add ``<name>_adjoint``, ``<name>_directional`` and its adjoint to `mod`.

    ``<name>_directional(arguments, one direction per weight)`` is Σ ⟨gradient, direction⟩; the
    gradients that its adjoint returns are H·v, H the Hessian of the loss in `weights`.
    """
    mod = differentiate(mod, name, list(weights))
    func = mod[name + SUFFIX]
    arguments = [relax.Var(p.name, p.ty) for p in func.params]
    wanted = [p for p in arguments if p.name in weights]
    directions = [relax.Var(DIRECTION + w, _named(wanted, w).ty) for w in weights]
    bb = relax.BlockBuilder(mod)
    with bb.function(name + DIRECTIONAL, [*arguments, *directions]):
        with bb.dataflow():
            call = bb.emit(relax.Call(mod.get_global_var(name + SUFFIX), arguments))
            gradients = bb.emit(relax.TupleGetItem(call, 1))
            total = bb.emit_output(_inner_product(bb, gradients, directions))
        bb.emit_func_output(total)
    return differentiate(bb.get(), name + DIRECTIONAL, list(weights))


def _shifts(
    mod: IRModule, name: str, args: Mapping[str, np.ndarray], sites: Mapping[str, int]
) -> dict[str, tuple[np.ndarray, float]]:
    """By weight Q(w) - w, and the share of its elements that are clipped."""
    run = Twin(mod, name).run([to_torch(arg) for arg in args.values()])
    return {
        weight: (
            (run.quantized[site].numpy() - args[weight]).astype(args[weight].dtype),
            float(run.clipped[site].double().mean()),
        )
        for weight, site in sites.items()
    }


def _named(params: Sequence[relax.Var], name: str) -> relax.Var:
    return next(param for param in params if param.name == name)


def _inner_product(
    bb: relax.BlockBuilder, gradients: relax.Var, directions: Sequence[relax.Var]
) -> relax.Expr:
    products = [
        bb.emit(R.sum(R.multiply(relax.TupleGetItem(gradients, i), direction)))
        for i, direction in enumerate(directions)
    ]
    total = products[0]
    for product in products[1:]:
        total = bb.emit(R.add(total, product))
    return total


def _gradients(run: Run, name: str, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [gradient.astype("float64") for gradient in run(name + SUFFIX, args)[1]]


def _row(
    name: str, operator: str, at_int4: np.ndarray, at_float: np.ndarray, curved: np.ndarray,
    clipped: float,
) -> FidelityRow:  # fmt: skip
    found = measure(at_int4, at_float, 0.0)
    unexplained = measure(curved, at_int4 - at_float, 0.0)
    return FidelityRow(
        name, operator, found.relative_l2, found.cosine, found.max_difference,
        unexplained.relative_l2, clipped,
    )  # fmt: skip
