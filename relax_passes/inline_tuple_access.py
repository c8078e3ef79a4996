"""Take the access to a nested tuple out of a fused function. Runs between FuseOps and FuseTIR."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from ._map_functions import map_functions


@tvm.transform.module_pass(opt_level=0, name="InlineTupleAccess")
class InlineTupleAccess:
    """Replace the call of a private function that only reads a field of a tuple by the field.

    TVM's FuseOps makes one for each field of a tuple in a tuple, which FuseTIR cannot compile.

    Before::

        @I.ir_module
        class Before:
            @R.function(private=True)
            def fused(p: R.Tuple(R.Tensor((4,), "float32"), R.Tensor((4,), "float32"))):
                R.func_attr({"Primitive": True})
                with R.dataflow():
                    y = p[0]
                    R.output(y)
                return y

            @R.function
            def main(p: R.Tuple(R.Tuple(R.Tensor((4,), "float32"), R.Tensor((4,), "float32")))):
                cls = Before
                with R.dataflow():
                    pair = p[0]
                    y = cls.fused(pair)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(p: R.Tuple(R.Tuple(R.Tensor((4,), "float32"), R.Tensor((4,), "float32")))):
                with R.dataflow():
                    pair = p[0]
                    y = pair[0]
                    R.output(y)
                return y
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        fields = {
            gvar.name_hint: index
            for gvar, func in mod.functions_items()
            if (index := _field(func)) is not None
        }
        if not fields:
            return mod
        out = map_functions(mod, lambda _, func: _Inliner(mod, fields).visit_expr(func))
        for name in fields:
            del out[name]
        return out


def _field(func: object) -> int | None:
    """Which field of its one argument a fused function returns, and nothing else."""
    if not isinstance(func, relax.Function) or "Primitive" not in (func.attrs or {}):
        return None
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    if len(bindings) != 1 or not bindings[0].var.same_as(func.body.body):
        return None
    value = bindings[0].value
    is_field = isinstance(value, relax.TupleGetItem) and [value.tuple_value] == list(func.params)
    return value.index if is_field else None


@mutator
class _Inliner(PyExprMutator):
    def __init__(self, mod: IRModule, fields: dict[str, int]) -> None:
        super().__init__(mod)
        self.fields = fields

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if isinstance(call.op, relax.GlobalVar) and call.op.name_hint in self.fields:
            return relax.TupleGetItem(call.args[0], self.fields[call.op.name_hint])
        return call
