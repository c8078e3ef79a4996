"""Lower `relax.sits.attention` to a PrimFunc, or to matmuls and a softmax. Runs before
LegalizeOps and the fusion of transposes into matmuls, which then see the products."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import IRModule, Op
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.report import LoweredAttention, Report
from sits_tvm.target import parse_target
from tir_schedules.attention.rule import attention_kernel

from ._map_functions import map_functions
from .op._attention_plain import lower_plain


@tvm.transform.module_pass(opt_level=0, name="LowerAttention")
class LowerAttention:
    """Replace every `R.sits.attention` by the plain ops that define it, or by one PrimFunc.

    For a target with a kernel that takes the call, it becomes `R.call_tir` of a function that the
    rule `Attention` makes that kernel of, which needs no memory for the scores. A note says why
    another became plain ops. Without a target:

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(
                q: R.Tensor((1, 4, "s", 16), "float32"),
                k: R.Tensor((1, 2, "s", 16), "float32"),
                v: R.Tensor((1, 2, "s", 16), "float32"),
            ) -> R.Tensor((1, 4, "s", 16), "float32"):
                with R.dataflow():
                    y = R.sits.attention(q, k, v, causal=0)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(
                q: R.Tensor((1, 4, "s", 16), "float32"),
                k: R.Tensor((1, 2, "s", 16), "float32"),
                v: R.Tensor((1, 2, "s", 16), "float32"),
            ) -> R.Tensor((1, 4, "s", 16), "float32"):
                s = T.int64()
                with R.dataflow():
                    rows = R.reshape(q, R.shape([1, 2, 2 * s, 16]))
                    scaled = R.multiply(rows, R.const(0.25, "float32"))
                    kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                    product = R.matmul(scaled, kt)
                    scores = R.reshape(product, R.shape([1, 4, s, s]))
                    queries = R.arange(0, s, 1, dtype="int64")
                    query = R.expand_dims(queries, axis=[1])
                    key = R.arange(0, s, 1, dtype="int64")
                    visible = R.less_equal(key, query)
                    masked = R.where(visible, scores, R.const(float("-inf"), "float32"))
                    softmax = R.nn.softmax(masked, axis=-1)
                    weights = R.reshape(softmax, R.shape([1, 2, 2 * s, s]))
                    out = R.matmul(weights, v)
                    heads = R.reshape(out, R.shape([1, 4, s, 16]))
                    y = heads
                    R.output(y)
                return y

    Parameters
    ----------
    target : str, dict or Target, optional
        Whose kernels to use. Default: none, plain ops everywhere.
    report : Report, optional
        Gets a row in `lowered_attention` per attention: its kernel, or why it became plain ops.
    """

    def __init__(
        self,
        target: str | dict[str, Any] | Target | None = None,
        *,
        report: Report | None = None,
    ) -> None:
        is_parsed = target is None or isinstance(target, Target)
        self.target = target if is_parsed else parse_target(target)
        self.report = report if report is not None else Report()

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return _Lowerer(mod, self.target, self.report).run()


@mutator
class _Lowerer(PyExprMutator):
    def __init__(self, mod: IRModule, target: Target | None, report: Report) -> None:
        super().__init__(mod)
        self.mod, self.target, self.rows = mod, target, report.lowered_attention
        self.function, self.binding = "", ""
        self.kernels: list[tuple[relax.Call, relax.GlobalVar]] = []

    def run(self) -> IRModule:
        out = map_functions(self.mod, self._lower)
        for _, kernel in self.kernels:
            out[kernel] = self.builder_.get()[kernel]
        return out

    def _lower(self, name: str, func: relax.Function) -> relax.Function:
        self.function = name
        return self.visit_expr(func)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.binding = binding.var.name
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != Op.get("relax.sits.attention"):
            return call
        unknown = [x for x in call.args[:3] if not isinstance(x.ty.shape, relax.ShapeExpr)]
        if unknown:
            self._refuse(unknown)
            return call
        kernel = self._call_kernel(call)
        return lower_plain(self.builder_, call) if kernel is None else kernel

    def _call_kernel(self, call: relax.Call) -> relax.Expr | None:
        if self.target is None:
            self._note(reason="plain ops are asked for")
            return None
        call = self.builder_.normalize(call)
        made = [kernel for other, kernel in self.kernels if _takes_same_kernel(call, other)]
        kernel = made[0] if made else self._make_kernel(call)
        if kernel is None:
            return None
        self._note(kernel=kernel.name_hint)
        return relax.call_tir(kernel, list(call.args), call.ty)

    def _note(self, kernel: str = "", reason: str = "") -> None:
        self.rows.append(LoweredAttention(self.function, self.binding, kernel, reason))

    def _make_kernel(self, call: relax.Call) -> relax.GlobalVar | None:
        kernel = attention_kernel(call, self.target)
        if isinstance(kernel, tirx.PrimFunc):
            self.kernels.append((call, self.builder_.add_func(kernel, "attention")))
            return self.kernels[-1][1]
        self._note(reason=kernel)
        where = {"function": self.function, "binding": self.binding}
        emit(Diagnostic.note("attention-plain", f"lowered to plain ops: {kernel}", **where))
        return None

    def _refuse(self, unknown: list[relax.Expr]) -> None:
        message = f"shape unknown: {', '.join(f'{x} is {x.ty}' for x in unknown)}"
        where = {"function": self.function, "binding": self.binding}
        advice = "bind the argument with R.match_cast to a type with a shape, symbolic or not"
        emit(Diagnostic.error("attention-shape-unknown", message, help=advice, **where))


def _takes_same_kernel(call: relax.Call, other: relax.Call) -> bool:
    """The same types, up to the names of symbolic extents, and attributes."""
    types, others = (relax.TupleType([x.ty for x in c.args]) for c in (call, other))
    same_types = tvm_ffi.structural_equal(types, others, map_free_vars=True)
    return same_types and tvm_ffi.structural_equal(call.attrs, other.attrs)
