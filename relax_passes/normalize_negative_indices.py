"""Make negative indices of gathers nonnegative. Runs before LegalizeOps.

Handles take and its gradient (mode "fast"), gather_elements, gather_nd, index_tensor and
scatter_nd, which read or write outside the tensor for an index of -1, or drop it. Leaves alone:
take in a mode that defines such an index, and index_put, scatter_elements and strided_slice, which
count from the end by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst
from tvm.ir.transform import PassContext
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm.diagnostics import Diagnostic, emit

from ._map_functions import map_functions

_REWRITES = {
    "relax.take": "take",
    "relax.sits.take_backward": "take_backward",
    "relax.gather_elements": "gather_elements",
    "relax.gather_nd": "gather_nd",
    "relax.scatter_nd": "gather_nd",
    "relax.index_tensor": "index_tensor",
}


@tvm.transform.module_pass(opt_level=0, name="NormalizeNegativeIndices")
class NormalizeNegativeIndices:
    """Add the length of the axis to negative indices, so that they count from its end.

    Constant indices are rewritten, also along a symbolic axis; one outside -n … n - 1 is an error.
    Indices that are known at run time only are left alone unless `dynamic` is set: Relax leaves
    their negative values undefined, and embedding lookups need no check.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((5, 8), "float32")) -> R.Tensor((2, 8), "float32"):
                return R.take(x, R.const([-1, 0], "int64"), axis=0)

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((5, 8), "float32")) -> R.Tensor((2, 8), "float32"):
                return R.take(x, R.const([4, 0], "int64"), axis=0)
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        def visit(name: str, func: relax.Function) -> relax.Function:
            return _Normalizer(mod, name).visit_expr(func)

        return map_functions(mod, visit)


@mutator
class _Normalizer(PyExprMutator):
    def __init__(self, mod: IRModule, name: str) -> None:
        super().__init__(mod)
        self.name, self.binding = name, ""

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.binding = binding.var.name
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        rewrite = _REWRITES.get(getattr(call.op, "name", ""))
        if rewrite is None or not isinstance(call.args[0].ty.shape, relax.ShapeExpr):
            return call
        args = getattr(self, rewrite)(call, call.args[0].ty.shape)
        if args is None or all(new is old for new, old in zip(args, call.args, strict=True)):
            return call
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def take(self, call: relax.Call, shape: relax.ShapeExpr) -> list[relax.Expr] | None:
        if call.attrs.mode != "fast":
            return None
        axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
        return [call.args[0], self.wrap(call, call.args[1], [shape[axis]])]

    def take_backward(self, call: relax.Call, _: relax.ShapeExpr) -> list[relax.Expr] | None:
        if call.attrs["mode"] != "fast":
            return None
        gy, index, shape = call.args
        axis = 0 if call.attrs["axis"] is None else int(call.attrs["axis"])
        return [gy, self.wrap(call, index, [shape[axis]]), shape]

    def gather_elements(self, call: relax.Call, shape: relax.ShapeExpr) -> list[relax.Expr]:
        return [call.args[0], self.wrap(call, call.args[1], [shape[int(call.attrs.axis)]])]

    def gather_nd(self, call: relax.Call, shape: relax.ShapeExpr) -> list[relax.Expr] | None:
        batch = int(getattr(call.attrs, "batch_dims", 0))
        index_shape = call.args[1].ty.shape
        if not isinstance(index_shape, relax.ShapeExpr):
            return None
        sizes = list(shape)[batch : batch + int(index_shape[-1])]
        return [call.args[0], self.wrap(call, call.args[1], sizes), *call.args[2:]]

    def index_tensor(self, call: relax.Call, shape: relax.ShapeExpr) -> list[relax.Expr] | None:
        indices = self.fields(call.args[1])
        if indices is None:
            return None
        wrapped = [self.wrap(call, i, [n]) for i, n in zip(indices, shape, strict=False)]
        if all(new is old for new, old in zip(wrapped, indices, strict=True)):
            return None
        return [call.args[0], relax.Tuple(wrapped)]

    def fields(self, expr: relax.Expr) -> list[relax.Expr] | None:
        found = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        return list(found.fields) if isinstance(found, relax.Tuple) else None

    def wrap(self, call: relax.Call, index: relax.Expr, sizes: Sequence[tirx.Expr]) -> relax.Expr:
        """`index` plus `sizes` where negative; more than one size pair with its last axis."""
        found = self.lookup_binding(index) if isinstance(index, relax.Var) else index
        if isinstance(index, tirx.IntImm):
            self.check(call, np.array(int(index)), sizes)
            return index if int(index) >= 0 else relax.prim_value(sizes[0] - abs(int(index)))
        if isinstance(found, GenericConst):
            values = found.value.numpy()
            self.check(call, values, sizes)
            return self.wrap_constant(index, values, sizes) if (values < 0).any() else index
        return index

    def wrap_constant(
        self, index: relax.Expr, values: np.ndarray, sizes: Sequence[tirx.Expr]
    ) -> relax.Expr:
        dtype = str(index.ty.dtype)
        if _are_static(sizes):
            return relax.const(np.where(values < 0, values + _lengths(sizes), values), dtype)
        if values.ndim == 0:
            return relax.prim_value(sizes[0] - abs(int(values)))
        return self.select(relax.const(values < 0, "bool"), index, sizes)

    def select(
        self, negative: relax.Expr, index: relax.Expr, sizes: Sequence[tirx.Expr]
    ) -> relax.Expr:
        emit_ = self.builder_.emit
        dtype = str(index.ty.dtype)
        if _are_static(sizes):
            lengths = relax.const(_lengths(sizes), dtype)
        else:
            lengths = emit_(R.shape_to_tensor(emit_(relax.ShapeExpr(list(sizes)))))
            lengths = lengths if dtype == "int64" else emit_(R.astype(lengths, dtype))
            if len(sizes) == 1:
                lengths = emit_(R.reshape(lengths, []))
        return emit_(R.where(emit_(negative), emit_(R.add(index, lengths)), index))

    def check(self, call: relax.Call, values: np.ndarray, sizes: Sequence[tirx.Expr]) -> None:
        """An error where a constant index lies outside an axis of known length."""
        columns = [values] if len(sizes) == 1 else np.moveaxis(values, -1, 0)
        for column, size in zip(columns, sizes, strict=True):
            if not isinstance(size, tirx.IntImm):
                continue
            outside = column[(column < -int(size)) | (column >= int(size))]
            if outside.size:
                self.report(call, outside, int(size))

    def report(self, call: relax.Call, outside: np.ndarray, size: int) -> None:
        op = call.op.name.removeprefix("relax.")
        emit(
            Diagnostic.error(
                "index-out-of-bounds",
                f"R.{op} reads index {int(outside.flat[0])} of an axis of length {size}",
                function=self.name,
                binding=self.binding,
                help=f"write an index from {-size} to {size - 1}",
            )
        )


def _are_static(sizes: Sequence[tirx.Expr]) -> bool:
    return all(isinstance(size, tirx.IntImm) for size in sizes)


def _lengths(sizes: Sequence[tirx.Expr]) -> np.ndarray:
    """0-d for one size, 1-d for more."""
    lengths = np.array([int(size) for size in sizes])
    return lengths[0] if len(sizes) == 1 else lengths
