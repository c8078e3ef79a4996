"""Make a lookup outside its table visible. Runs before LegalizeOps.

`R.take` in its mode "fast" reads whatever memory an index points to: a token id beyond the
vocabulary, or a position beyond the learned ones, would give wrong numbers or end the process.
"""

from __future__ import annotations

import tvm
from tvm import DataType, IRModule, relax
from tvm.ir import GenericConst, Op
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from ._map_functions import map_functions


@tvm.transform.module_pass(opt_level=0, name="BoundTakeIndices")
class BoundTakeIndices:
    """Give NaN for a run-time index outside 0…n-1 of a float table, instead of reading there.

    Leaves alone: constant indices, which `NormalizeNegativeIndices` has checked, tables of
    integers, which have no NaN, and other modes.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(table: R.Tensor((5, 8), "float32"), ids: R.Tensor(("s",), "int64")):
                with R.dataflow():
                    y = R.take(table, ids, axis=0)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(table: R.Tensor((5, 8), "float32"), ids: R.Tensor(("s",), "int64")):
                with R.dataflow():
                    y = R.take(table, ids, axis=0, mode="nan")
                    R.output(y)
                return y
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return map_functions(mod, lambda _name, func: _Bounder(mod).visit_expr(func))


@mutator
class _Bounder(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != Op.get("relax.take") or call.attrs["mode"] != "fast":
            return call
        table, indices = call.args
        if isinstance(indices, GenericConst) or not _is_float(table):
            return call
        axis = call.attrs["axis"]  # None, of a table of one axis, fails in TVM with "nan"
        return relax.op.take(table, indices, 0 if axis is None else int(axis), mode="nan")


def _is_float(table: relax.Expr) -> bool:
    dtype = getattr(table.ty, "dtype", None)
    return dtype is not None and DataType(str(dtype)).type_code == DataType("float32").type_code
