"""Lower `relax.sits.attention` to matmuls and a softmax. Runs before LegalizeOps and the fusion of
transposes into matmuls, which then see the products."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import IRModule, Op
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes._map_functions import map_functions
from relax_passes.op._attention_plain import lower_plain
from sits_tvm.diagnostics import Diagnostic, emit


@tvm.transform.module_pass(opt_level=0, name="LowerAttention")
class LowerAttention:
    """Replace every `R.sits.attention` by the plain ops that define it.

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
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return map_functions(mod, lambda name, func: _Lowerer(mod, name).visit_expr(func))


@mutator
class _Lowerer(PyExprMutator):
    def __init__(self, mod: IRModule, function: str) -> None:
        super().__init__(mod)
        self.function, self.binding = function, ""

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
        return lower_plain(self.builder_, call)

    def _refuse(self, unknown: list[relax.Expr]) -> None:
        message = f"shape unknown: {', '.join(f'{x} is {x.ty}' for x in unknown)}"
        where = {"function": self.function, "binding": self.binding}
        advice = "bind the argument with R.match_cast to a type with a shape, symbolic or not"
        emit(Diagnostic.error("attention-shape-unknown", message, help=advice, **where))
