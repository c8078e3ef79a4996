"""Give quantization its gradient, in many spellings. Runs before `Gradient`, and repairs the
adjoints that were made without it. Leaves alone: float16 arithmetic, more than 8 bits, and what it
does not recognise; the report says why."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import IRModule, Op
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.report import QuantizeSite, Report

from ._adjoint import bindings_of, used_vars
from ._map_functions import map_functions
from .quantize_spellings.adjoint import is_adjoint, repair_adjoint
from .quantize_spellings.sites import Site, find_sites


@tvm.transform.module_pass(opt_level=0, name="FixQuantizeGradient")
class FixQuantizeGradient:
    """Replace quantization that is spelled in other ops by ``R.sits.fake_quantize``.

    Recognised: x divided by the scale, rounded, shifted by the zero point, clipped, shifted back
    and multiplied by the scale, with `R.clip` or minimum and maximum, through integer casts or not;
    `R.quantize` and `R.dequantize`, also clipped between them. Forward values stay what they are:
    what rounds otherwise is refused, with the reason in the report. The exceptions are NaN, which
    the op passes on, and the sign of a zero. A clip before the rounding has the mask "strict".

    An adjoint ``<f>_adjoint`` in which quantization is spelled out, whatever rules it was made by
    (identity, a gradient cast to an integer), is made anew from the op. Besides, it must be what
    `Gradient` makes: an adjoint that was edited is refused.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((8, 16), "float32"), scale: R.Tensor((8,), "float32")):
                with R.dataflow():
                    s = R.reshape(scale, R.shape([8, 1]))
                    ratio = R.divide(x, s)
                    rounded = R.round(ratio)
                    clipped = R.clip(rounded, -8, 7)
                    codes = R.astype(clipped, "int8")
                    wide = R.astype(codes, "float32")
                    y = R.multiply(wide, s)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((8, 16), "float32"), scale: R.Tensor((8,), "float32")):
                with R.dataflow():
                    y = R.sits.fake_quantize(
                        x, scale, bits=4, axis=0, group_size=None, signed=True,
                        narrow_range=False, clip_mask="rounded", scale_dtype=None,
                    )
                    R.output(y)
                return y

    Parameters
    ----------
    report : Report, optional
        Receives `quantize_sites`.
    """

    def __init__(self, *, report: Report | None = None) -> None:
        self.report = report if report is not None else Report()

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        adjoints = [name for name in _functions(mod) if is_adjoint(mod, name)]
        fixed = map_functions(
            mod, lambda name, f: f if name in adjoints else self._fix(mod, name, f)
        )
        return map_functions(
            fixed, lambda name, f: self._repair(mod, name, f) if name in adjoints else f
        )

    def _fix(self, mod: IRModule, name: str, func: relax.Function) -> relax.Function:
        sites = find_sites(func)
        for site in sites:
            self._note(name, site)
        return replace_sites(mod, func, sites)

    def _repair(self, mod: IRModule, name: str, func: relax.Function) -> relax.Function:
        repaired, rows = repair_adjoint(mod, name, replace_sites)
        for row, diagnostic in rows:
            self.report.quantize_sites.append(row)
            if diagnostic is not None:
                emit(diagnostic)
        return func if repaired is None else repaired

    def _note(self, function: str, site: Site) -> None:
        refused, var = site.refused, site.var
        reason = f"{refused.code}: {refused.message}" if refused else ""
        row = QuantizeSite(function, var.name, site.form, refused is None, reason)
        self.report.quantize_sites.append(row)
        if refused is not None:
            emit(_diagnostic(function, site))


def _diagnostic(function: str, site: Site) -> Diagnostic:
    """A warning where the gradient is lost, a note where the ops keep theirs."""
    refused = site.refused
    assert refused is not None
    make = Diagnostic.warning if site.cuts_gradient else Diagnostic.note
    what = (
        "its gradient goes through a cast to an integer and is lost"
        if site.cuts_gradient
        else "its ops keep their own straight-through gradients"
    )
    message = f"`{site.var.name}` stays as it is ({site.form}): {refused.message}; {what}"
    help = refused.help or "write R.sits.fake_quantize"
    return make(refused.code, message, function=function, binding=site.var.name, help=help)


def _functions(mod: IRModule) -> list[str]:
    return [gv.name_hint for gv, f in mod.functions.items() if isinstance(f, relax.Function)]


def replace_sites(mod: IRModule, func: relax.Function, sites: list[Site]) -> relax.Function:
    """`func` with the op in place of each site, without what then is unused."""
    made = {site.var: site.make() for site in sites if site.make is not None}
    return _Replacer(mod, made, _unused(func, made)).visit_expr(func) if made else func


def _unused(func: relax.Function, made: dict[relax.Var, relax.Call]) -> set[relax.Var]:
    """What nothing reads once `made` are the values of its variables."""
    needed, unused = set(used_vars(func.body.body)), set()
    for binding in reversed(bindings_of(func)):
        if binding.var not in needed and _is_pure_op(binding):
            unused.add(binding.var)
        else:
            needed |= set(used_vars(made.get(binding.var, binding.value)))
    return unused


def _is_pure_op(binding: relax.Binding) -> bool:
    call = binding.value
    is_op = isinstance(binding, relax.VarBinding) and isinstance(call, relax.Call)
    return is_op and isinstance(call.op, Op) and bool(call.op.get_attr("FPurity"))


@mutator
class _Replacer(PyExprMutator):
    def __init__(
        self, mod: IRModule, made: dict[relax.Var, relax.Call], unused: set[relax.Var]
    ) -> None:
        super().__init__(mod)
        self.made, self.unused = made, unused

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.unused:
            return
        if binding.var in self.made:
            binding = relax.VarBinding(binding.var, self._emit_parameters(binding.var))
        super().visit_var_binding_(binding)

    def _emit_parameters(self, var: relax.Var) -> relax.Call:
        """The call for `var`; a scale or zero point in a new shape gets a name after it."""
        call = self.made[var]
        names = ("", f"{var.name}_scale", f"{var.name}_zero_point")
        args = [
            self._emit(arg, name) if isinstance(arg, relax.Call) else arg
            for arg, name in zip(call.args, names, strict=False)
        ]
        return relax.Call(call.op, args, call.attrs)

    def _emit(self, call: relax.Call, name: str) -> relax.Var:
        first, *rest = call.args
        if isinstance(first, relax.Call):
            first = self._emit(first, name)
        return self.builder_.emit(relax.Call(call.op, [self.visit_expr(first), *rest]), name)
