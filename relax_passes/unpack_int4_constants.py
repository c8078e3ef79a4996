"""Store int4 constants as int8. Runs before LegalizeOps. Leaves alone: those that no cast reads."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm import int4_tensors  # noqa: F401  makes int4 arrays constants in the first place

from ._map_functions import map_functions


@tvm.transform.module_pass(opt_level=0, name="UnpackInt4Constants")
class UnpackInt4Constants:
    """Replace an int4 (uint4) constant under a cast by the same values in int8 (uint8).

    No code can be generated for tensors of 4-bit elements. A cast does not care what its argument
    was stored in, so nothing else changes. A constant that another op reads stays, and
    `CheckSubByteBuffers` refuses it.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                with R.dataflow():
                    w = R.astype(R.const(-3, "int4"), "float32")
                    y = R.multiply(x, w)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                with R.dataflow():
                    w = R.astype(R.const(-3, "int8"), "float32")
                    y = R.multiply(x, w)
                    R.output(y)
                return y
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return map_functions(mod, lambda _, func: _Unpacker(mod).visit_expr(func))


@mutator
class _Unpacker(PyExprMutator):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.named: dict[relax.Var, GenericConst] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if _is_int4(binding.value) and isinstance(binding.var, relax.DataflowVar):
            self.named[binding.var] = binding.value  # its uses read the constant itself
        else:
            super().visit_var_binding_(binding)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self.named.get(var) or super().visit_dataflow_var_(var)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") != "relax.astype" or not _is_int4(call.args[0]):
            return call
        values = call.args[0].value.numpy()  # int8 or uint8
        return relax.op.astype(relax.const(values, str(values.dtype)), call.attrs.dtype)


def _is_int4(expr: relax.Expr) -> bool:
    is_constant = isinstance(expr, GenericConst) and isinstance(expr.ty, relax.TensorType)
    return is_constant and str(expr.ty.dtype) in ("int4", "uint4")
