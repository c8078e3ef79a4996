"""Sum a bool up in int64. Runs before LegalizeOps. Leaves alone: cumsum of an integer or float."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.ir.transform import PassContext
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from ._map_functions import map_functions

_SCANS = {"relax.cumsum": R.cumsum, "relax.cumprod": R.cumprod}


@tvm.transform.module_pass(opt_level=0, name="WidenCumsum")
class WidenCumsum:
    """Give cumsum and cumprod of a bool tensor the result type int64, as PyTorch has it.

    Without a dtype Relax keeps bool, for which no code can be generated. An explicit
    ``dtype="bool"`` stays the type of the result: the scan runs in int64 and is cast. An integer
    keeps its dtype and wraps around, as Relax defines.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((8,), "bool")) -> R.Tensor((8,), "bool"):
                return R.cumsum(x, axis=0)

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((8,), "bool")) -> R.Tensor((8,), "int64"):
                return R.cumsum(x, axis=0, dtype="int64")
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return map_functions(mod, lambda _, func: _Widener(mod).visit_expr(func))


@mutator
class _Widener(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        scan = _SCANS.get(getattr(call.op, "name", ""))
        dtype = call.attrs.dtype if scan else None
        if scan is None or call.args[0].ty.dtype != "bool" or dtype not in (None, "bool"):
            return call
        wide = scan(call.args[0], call.attrs.axis, "int64", call.attrs.exclusive)
        return wide if dtype is None else R.astype(self.builder_.emit(wide), "bool")
