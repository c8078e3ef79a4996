"""Replace what stops a gradient by what it returns. Runs before the patterns of quantization."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.ir import Op
from tvm.ir.transform import Pass, PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from ._map_functions import map_functions

_NO_GRAD = Op.get("relax.grad.no_grad")


@tvm.transform.module_pass(opt_level=0, name="RemoveStopGradients")
class RemoveStopGradients:
    """Replace ``R.grad.no_grad(x)`` by ``x``: once the adjoints are made, it is the identity.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((4, 3), "float32")):
                with R.dataflow():
                    frozen = R.grad.no_grad(w)
                    y = R.matmul(x, frozen)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((4, 3), "float32")):
                with R.dataflow():
                    y = R.matmul(x, w)
                    R.output(y)
                return y
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        removed = map_functions(
            mod, lambda _, func: _Remover(mod).visit_expr(func) if _stops_gradients(func) else func
        )
        without_copies: Pass = relax.transform.CanonicalizeBindings()
        return mod if removed.same_as(mod) else without_copies(removed)


def _stops_gradients(func: relax.Function) -> bool:
    found: list[relax.Call] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and expr.op == _NO_GRAD:
            found.append(expr)

    relax.analysis.post_order_visit(func, visit)
    return bool(found)


@mutator
class _Remover(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        return call.args[0] if call.op == _NO_GRAD else call
