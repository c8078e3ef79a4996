"""Compute the ops that TVM cannot lower in bfloat16 in float32. Runs before LegalizeOps."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes._map_functions import map_functions

# What LegalizeOps or LLVM refuses in TVM 0.27, of the ops that Relax types in bfloat16 at all.
_OPS = {
    *("relax.nn.layer_norm", "relax.nn.instance_norm", "relax.power", "relax.log_add_exp"),
    *("relax.isnan", "relax.isinf", "relax.isfinite", "relax.argmax", "relax.argmin"),
}


@tvm.transform.module_pass(opt_level=0, name="WidenBfloat16Ops")
class WidenBfloat16Ops:
    """Cast the bfloat16 arguments of such an op to float32, and its result back.

    Every bfloat16 is a float32, so the result is that of the op rounded once. Runs of other ops
    stay in bfloat16.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(
                x: R.Tensor((4, 8), "bfloat16"), y: R.Tensor((4, 8), "bfloat16")
            ) -> R.Tensor((4, 8), "bfloat16"):
                return R.power(x, y)

    After::

        @I.ir_module
        class After:
            @R.function
            def main(
                x: R.Tensor((4, 8), "bfloat16"), y: R.Tensor((4, 8), "bfloat16")
            ) -> R.Tensor((4, 8), "bfloat16"):
                a = R.astype(x, "float32")
                b = R.astype(y, "float32")
                z = R.power(a, b)
                return R.astype(z, "bfloat16")
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return map_functions(mod, lambda _, func: _Widener(mod).visit_expr(func))


@mutator
class _Widener(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") not in _OPS or not any(map(_is_bfloat16, call.args)):
            return call
        narrow = _is_bfloat16(self.builder_.normalize(call))
        args = [self._widen(arg) for arg in call.args]
        wide = relax.Call(call.op, args, call.attrs, call.ty_args)
        if not narrow:
            return wide
        return relax.op.astype(self.builder_.emit(wide), "bfloat16")

    def _widen(self, arg: relax.Expr) -> relax.Expr:
        if not _is_bfloat16(arg):
            return arg
        return self.builder_.emit(relax.op.astype(arg, "float32"))


def _is_bfloat16(expr: relax.Expr) -> bool:
    ty = getattr(expr, "ty", None)
    return isinstance(ty, relax.TensorType) and str(ty.dtype) == "bfloat16"
