"""Compute in float32 what TVM cannot lower in bfloat16, and what sums. Runs before LegalizeOps.
Leaves alone: elementwise ops, and those that move elements."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.ir.transform import PassContext
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from ._map_functions import map_functions

_LACKING = ("power", "log_add_exp", "isnan", "isinf", "isfinite", "argmax", "argmin")
_SORTING = ("sort", "argsort", "topk", "median")  # TVM's sort reads bfloat16 as an integer
_SUMMING = (
    *("sum", "mean", "variance", "std", "prod", "max", "min", "cumsum", "cumprod", "einsum"),
    *("grad.avg_pool2d_backward", "grad.max_pool2d_backward", "sits.take_backward"),
)
_LAYERS = (
    *("softmax", "log_softmax", "layer_norm", "group_norm", "instance_norm", "rms_norm"),
    *("batch_norm", "nll_loss", "cross_entropy_with_logits"),
    *(f"conv{d}d{kind}" for d in (1, 2, 3) for kind in ("", "_transpose")),
    *(f"{kind}_pool{d}d" for d in (1, 2, 3) for kind in ("max", "avg", "adaptive_avg")),
)
_NAMES = (*_LACKING, *_SORTING, *_SUMMING, *(f"nn.{name}" for name in _LAYERS))
_OPS = {f"relax.{name}" for name in _NAMES}


@tvm.transform.module_pass(opt_level=0, name="WidenBfloat16Ops")
class WidenBfloat16Ops:
    """Cast the bfloat16 arguments of such an op to float32, and its result back.

    Every bfloat16 is a float32, so the result is that of the op rounded once, as in PyTorch; a sum
    in bfloat16 would stop growing at 256 times its terms. A matmul reads its operands as they are
    and sums in float32. Runs of elementwise ops stay in bfloat16.

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
        name = getattr(call.op, "name", "")
        if name == "relax.matmul" and _is_bfloat16(self.builder_.normalize(call)):
            product = self.builder_.emit(R.matmul(*call.args, out_dtype="float32"))
            return R.astype(product, "bfloat16")
        args = [self._widen(arg) for arg in call.args] if name in _OPS else []
        if all(new.same_as(old) for new, old in zip(args, call.args, strict=False)):
            return call
        wide = self.builder_.emit(relax.Call(call.op, args, call.attrs, call.ty_args))
        return self._narrow(wide, self.builder_.normalize(call).ty)

    def _widen(self, arg: relax.Expr) -> relax.Expr:
        if isinstance(arg, relax.Tuple):
            fields = [self._widen(field) for field in arg]
            same = all(new.same_as(old) for new, old in zip(fields, arg, strict=True))
            return arg if same else relax.Tuple(fields)
        if not _is_bfloat16(arg):
            return arg
        if isinstance(arg, GenericConst):
            return relax.const(arg.value.numpy().astype(np.float32))
        return self.builder_.emit(R.astype(arg, "float32"))

    def _narrow(self, value: relax.Expr, ty: tvm.ir.Type) -> relax.Expr:
        """`value` with the dtypes of `ty`."""
        if isinstance(ty, relax.TupleType):
            fields = [relax.TupleGetItem(value, i) for i in range(len(ty.fields))]
            fields = [self.builder_.emit(field) for field in fields]
            return relax.Tuple(list(map(self._narrow, fields, ty.fields)))
        return value if value.ty.dtype == ty.dtype else R.astype(value, "bfloat16")


def _is_bfloat16(expr: relax.Expr) -> bool:
    ty = getattr(expr, "ty", None)
    return isinstance(ty, relax.TensorType) and str(ty.dtype) == "bfloat16"
