"""Make ``<f>_adjoint`` anew where quantization in it is spelled in other ops than ours.

The forward part is taken from the adjoint itself, its quantization replaced by the op, and
differentiated again. The two may differ only in what flows out of quantization, see
`adjoint_comparison`. Any other difference was made by hand, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tvm import IRModule, relax
from tvm.ir import GlobalVar

from sits_tvm.diagnostics import Diagnostic, SitsError
from sits_tvm.report import QuantizeSite

from .._adjoint import (
    SUFFIX,
    Adjoint,
    adjoint_names,
    primal_name,
    read_adjoint,
)
from .._values import Values
from .adjoint_comparison import first_difference
from .sites import Site, find_sites

Row = tuple[QuantizeSite, Diagnostic | None]
Replace = Callable[[IRModule, relax.Function, list[Site]], relax.Function]


class NotRepaired(Exception):
    """Why an adjoint cannot be made anew."""


def is_adjoint(mod: IRModule, name: str) -> bool:
    """Whether `name` is ``<f>_adjoint``: f is there, or the gradients have `Gradient`'s names."""
    if not name.endswith(SUFFIX):
        return False
    if name.removesuffix(SUFFIX) in adjoint_names(mod):
        return True
    parts = _parts(mod[name])
    params = {param.name for param in mod[name].params}
    return parts is not None and {primal_name(_named(g)) for g in parts[1]} <= params


def _parts(func: relax.Function) -> tuple[relax.Expr, list[relax.Expr]] | None:
    """The outputs and the gradients that an adjoint returns."""
    values = Values(func)
    pair = values.of(func.body.body)
    if not isinstance(pair, relax.Tuple) or len(pair.fields) != 2:
        return None
    outputs, gradients = pair.fields
    found = values.of(gradients)
    return outputs, list(found.fields) if isinstance(found, relax.Tuple) else [gradients]


def _named(expr: relax.Expr) -> str:
    return expr.name if isinstance(expr, relax.Var) else ""


def repair_adjoint(
    mod: IRModule, name: str, replace_sites: Replace
) -> tuple[relax.Function | None, list[Row]]:
    """The right adjoint, or None where `name` stays; a row for each site in it."""
    func, primal = mod[name], name.removesuffix(SUFFIX)
    spelled = [site for site in find_sites(_forward(func)) if site.make is not None]
    if not spelled:
        return None, []
    try:
        if primal.endswith(SUFFIX):
            raise NotRepaired(f"it differentiates {primal}; differentiate that again")
        pair = IRModule({GlobalVar(primal): _forward(func), GlobalVar(name): func})
        adjoint = read_adjoint(pair, primal)
        repaired = _differentiate(mod, adjoint, spelled, replace_sites)
    except (NotRepaired, SitsError) as error:
        why = str(error).splitlines()[0]
        return None, [_refused(name, site, why) for site in spelled]
    made = "the adjoint is made anew, from R.sits.fake_quantize"
    rows = [QuantizeSite(name, site.var.name, site.form, True, made) for site in spelled]
    return repaired, [(row, None) for row in rows]


def _refused(name: str, site: Site, why: str) -> Row:
    message = f"the gradient of `{site.var.name}` ({site.form}) stays as it is: {why}"
    help = "make the adjoint with sits_tvm.differentiate(mod, func)"
    where = {"function": name, "binding": site.var.name, "help": help}
    diagnostic = Diagnostic.warning("adjoint-not-repaired", message, **where)
    return QuantizeSite(name, site.var.name, site.form, False, why), diagnostic


def _forward(func: relax.Function) -> relax.Function:
    """The part of an adjoint that computes the outputs."""
    parts = _parts(func)
    outputs = func.body.body if parts is None else parts[0]
    body = relax.SeqExpr(func.body.blocks, outputs)
    forward = relax.Function(func.params, body, outputs.ty, func.is_pure, func.attrs)
    return relax.analysis.remove_all_unused(forward)


def _differentiate(
    mod: IRModule, adjoint: Adjoint, spelled: list[Site], replace_sites: Replace
) -> relax.Function:
    """The adjoint of the forward part with the op in place of `spelled`."""
    name, func = adjoint.name, adjoint.function
    fixed = replace_sites(mod, _forward(func), spelled)
    fixed = fixed.with_attr("global_symbol", name)
    others = {gv: f for gv, f in mod.functions.items() if gv.name_hint not in (name, name + SUFFIX)}
    module = IRModule({**others, GlobalVar(name): fixed})
    wanted = {param.name: param for param in module[name].params}
    require = [wanted[param.name] for param, _ in adjoint.gradients]
    problems = []
    for index in _scalar_outputs(fixed):
        try:
            made = relax.transform.Gradient(name, require, index)(module)[name + SUFFIX]
        except Exception as error:  # whatever Gradient says of an op
            problems.append(str(error).strip().splitlines()[-1])
            continue
        difference = _renamed(adjoint) or first_difference(
            func, _forward(func), made, fixed, {site.var.name for site in spelled}
        )
        if difference is None:
            return made
        problems.append(f"besides quantization it is not what Gradient makes, at `{difference}`")
    raise NotRepaired(problems[0] if problems else "no output is a float scalar")


def _renamed(adjoint: Adjoint) -> str | None:
    """A returned gradient that is not just the `<parameter>_adjoint` that `Gradient` sums up."""
    values = Values(adjoint.function)
    for param, gradient in adjoint.gradients:
        names, copy = [], gradient
        while isinstance(copy, relax.Var):
            names.append(copy.name)
            copy = values.bound.get(copy)
        if not any(re.fullmatch(rf"{re.escape(param.name)}{SUFFIX}\d*", name) for name in names):
            return _named(gradient)
    return None


def _scalar_outputs(func: relax.Function) -> Iterator[int]:
    values = Values(func)
    result = values.of(func.body.body)
    outputs = result.fields if isinstance(result, relax.Tuple) else [func.body.body]
    for index, output in enumerate(outputs):
        if isinstance(output.ty, relax.TensorType) and output.ty.ndim == 0:
            yield index
