"""Fill tensors with infinity and NaN. Runs before LegalizeOps, where TVM fails on them.

Leaves alone: finite numbers, and values that are known at run time only.
"""

from __future__ import annotations

import math

import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.ir.transform import PassContext
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from ._map_functions import map_functions

_FILLS = ("relax.full", "relax.full_like")


@tvm.transform.module_pass(opt_level=0, name="BroadcastInfiniteFills")
class BroadcastInfiniteFills:
    """Broadcast a constant to the shape, where `R.full` and `R.full_like` hold Inf or NaN.

    `topi.full`, by which TVM lowers both, raises a TypeError for these.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(s: R.Shape(["n"])) -> R.Tensor(("n", "n"), "float32"):
                n = T.int64()
                return R.full(R.shape([n, n]), R.const(float("-inf"), "float32"), "float32")

    After::

        @I.ir_module
        class After:
            @R.function
            def main(s: R.Shape(["n"])) -> R.Tensor(("n", "n"), "float32"):
                n = T.int64()
                return R.broadcast_to(R.const(float("-inf"), "float32"), R.shape([n, n]))
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return map_functions(mod, lambda _, func: _Broadcaster(mod).visit_expr(func))


@mutator
class _Broadcaster(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = getattr(call.op, "name", "")
        if name not in _FILLS or not _is_infinite(call.args[1]) or "float" not in _dtype(call):
            return call
        shape = call.args[0] if name == "relax.full" else call.args[0].ty.shape
        if shape is None:
            return call
        number = relax.const(float(call.args[1].value.numpy()), _dtype(call))
        return R.broadcast_to(number, shape)


def _is_infinite(fill: relax.Expr) -> bool:
    if not isinstance(fill, GenericConst) or "float" not in str(fill.ty.dtype):
        return False
    return not math.isfinite(float(fill.value.numpy()))


def _dtype(call: relax.Call) -> str:
    return str(call.ty.dtype)
