"""Give each matmul a transpose of its own, each function constants of its own. Runs before TVM's
FuseTransposeMatmul, which fails where the gradient of a product reads the transpose too, on x xᵀ,
and where ``<f>`` and ``<f>_adjoint`` hold the same constant."""

from __future__ import annotations

from collections import Counter

import tvm
import tvm_ffi
from tvm import IRModule, relax
from tvm.ir import GenericConst, Op
from tvm.ir.transform import PassContext
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from ._map_functions import map_functions


@tvm.transform.module_pass(opt_level=0, name="SplitSharedOperands")
class SplitSharedOperands:
    """Copy a `permute_dims` that a matmul multiplies by, where it has another reader.

    The copy costs nothing: fused into the product, it becomes an index. A product of a tensor with
    its own transpose reads the second one under another name. A constant that another function
    holds too, as the same object, becomes an equal one.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((3, 4), "float32")):
                with R.dataflow():
                    wt = R.permute_dims(w)
                    y = R.matmul(x, wt)
                    z = R.exp(wt)
                    R.output(y, z)
                return (y, z)

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((3, 4), "float32")):
                with R.dataflow():
                    wt = R.permute_dims(w)
                    own = R.permute_dims(w)
                    y = R.matmul(x, own)
                    z = R.exp(wt)
                    R.output(y, z)
                return (y, z)
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        constants = _shared_constants(mod)
        return map_functions(mod, lambda _, func: _Splitter(mod, func, constants).visit_expr(func))


@mutator
class _Splitter(PyExprMutator):
    def __init__(self, mod: IRModule, func: relax.Function, constants: set[GenericConst]) -> None:
        super().__init__(mod)
        self.transposes, self.constants = _shared_transposes(func), constants

    def visit_generic_const_(self, const: GenericConst) -> relax.Expr:
        return relax.const(const.value, str(const.ty.dtype)) if const in self.constants else const

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        is_shared = call.op == Op.get("relax.matmul") and call.args[1] in self.transposes
        call = super().visit_call_(call)
        if call.op != Op.get("relax.matmul") or not isinstance(call.args[1], relax.Var):
            return call
        transpose = self.lookup_binding(call.args[1])
        if not _is_transpose(transpose):
            return call
        source, is_gram = transpose.args[0], transpose.args[0].same_as(call.args[0])
        if is_gram and isinstance(source.ty.shape, relax.ShapeExpr):
            source = self.builder_.emit(R.reshape(source, source.ty.shape))  # a name of its own
        elif not is_shared:
            return call
        own = self.builder_.emit(R.permute_dims(source, transpose.attrs.axes))
        return R.matmul(call.args[0], own, call.attrs.out_dtype)


def _shared_constants(mod: IRModule) -> set[GenericConst]:
    """Constants that several Relax functions hold."""
    holders: Counter[GenericConst] = Counter()
    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            found: list[GenericConst] = []
            tvm_ffi.structural_walk(func, (GenericConst, found.append))
            holders.update(set(found))
    return {const for const, count in holders.items() if count > 1}


def _shared_transposes(func: relax.Function) -> set[relax.Var]:
    """Variables bound to a transpose that more than one binding or the result reads."""
    readers: Counter[relax.Var] = Counter()
    transposes = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings:
                    readers.update(relax.analysis.free_vars(binding.value))
                    if _is_transpose(binding.value):
                        transposes.append(binding.var)
            readers.update(relax.analysis.free_vars(expr.body))

    relax.analysis.post_order_visit(func, visit)
    return {var for var in transposes if readers[var] > 1}


def _is_transpose(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and value.op == Op.get("relax.permute_dims")
