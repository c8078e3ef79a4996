"""Give each matmul a transpose of its own. Runs before TVM's FuseTransposeMatmul, which fails on a
transpose that something else reads too, as the gradient of the product does."""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import IRModule, relax
from tvm.ir import Op
from tvm.ir.transform import PassContext
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes._map_functions import map_functions


@tvm.transform.module_pass(opt_level=0, name="SplitSharedTransposes")
class SplitSharedTransposes:
    """Copy a `permute_dims` that a matmul multiplies by, where it has another reader.

    The copy costs nothing: fused into the product, it becomes an index.

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
        return map_functions(mod, lambda _, func: _Splitter(mod, func).visit_expr(func))


@mutator
class _Splitter(PyExprMutator):
    def __init__(self, mod: IRModule, func: relax.Function) -> None:
        super().__init__(mod)
        self.shared = _shared_transposes(func)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        is_split = call.op == Op.get("relax.matmul") and call.args[1] in self.shared
        call = super().visit_call_(call)
        if not is_split:
            return call
        transpose = self.lookup_binding(call.args[1])
        own = self.builder_.emit(R.permute_dims(transpose.args[0], transpose.attrs.axes))
        return R.matmul(call.args[0], own, call.attrs.out_dtype)


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
