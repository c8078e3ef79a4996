"""Kernels that TVM's fusion would stop at stay out of it. Runs before FuseOps."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.ir.transform import PassContext

_CALLS = ("relax.call_tir", "relax.call_tir_inplace")
_OPAQUE = 8  # relax.op_pattern: fused with nothing
_NO_OFFSET = tirx.IntImm("int64", 0)


@tvm.transform.module_pass(opt_level=0, name="IsolateKernels")
class IsolateKernels:
    """Mark a kernel as opaque whose buffers are not what TVM makes of the tensors of its calls.

    FuseTIR compares what one kernel writes and another reads as both declare it, and stops where
    they differ: ``(m, 4)`` is not ``(3, 4)`` to it, nor is an int32 extent an int64 one. Kernels
    of a user's may have such buffers, or strides; and one whose extent ``R.match_cast`` named
    where TVM knows it now.

    Before::

        @I.ir_module
        class Before:
            @T.prim_func(private=True, s_tir=True)
            def twice(x: T.Buffer((3, 4), "float32"), y: T.Buffer((3, 4), "float32")):
                T.func_attr({"op_pattern": 0})
                for i, j in T.grid(3, 4):
                    with T.sblock("twice"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        y[vi, vj] = x[vi, vj] + x[vi, vj]

            @R.function
            def main(x: R.Tensor((3, 4), "float32")):
                cls = Before
                with R.dataflow():
                    y = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((3, 4), "float32"))
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @T.prim_func(private=True, s_tir=True)
            def twice(x: T.Buffer((3, 4), "float32"), y: T.Buffer((3, 4), "float32")):
                T.func_attr({"op_pattern": 8})
                for i, j in T.grid(3, 4):
                    with T.sblock("twice"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        y[vi, vj] = x[vi, vj] + x[vi, vj]

            @R.function
            def main(x: R.Tensor((3, 4), "float32")):
                cls = After
                with R.dataflow():
                    y = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((3, 4), "float32"))
                    R.output(y)
                return y
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        odd = {
            gvar
            for _, func in mod.functions_items()
            if isinstance(func, relax.Function)
            for gvar, types in _calls(func)
            if (mod[gvar].attrs or {}).get("op_pattern") != _OPAQUE
            and not all(map(_is_plain, mod[gvar].params, types))
        }
        if not odd:
            return mod
        result = mod.clone()
        for gvar in odd:
            result[gvar] = mod[gvar].with_attr("op_pattern", _OPAQUE)
        return result


def _calls(func: relax.Function) -> list[tuple[tvm.ir.GlobalVar, list[tvm.ir.Type]]]:
    """The kernels that a function calls, and for each of their parameters its type in Relax."""
    found = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") in _CALLS:
            found.append((expr.args[0], [*(arg.ty for arg in expr.args[1]), *_new_outputs(expr)]))

    relax.analysis.post_order_visit(func, visit)
    return found


def _new_outputs(call: relax.Call) -> list[tvm.ir.Type]:
    """Of the tensors that the kernel gets to write, beside those that it changes in place."""
    (out,) = call.ty_args
    types = list(out.fields) if isinstance(out, relax.TupleType) else [out]
    if call.op.name == _CALLS[0]:
        return types
    places = zip(types, call.attrs.inplace_indices, strict=True)
    return [type_ for type_, place in places if place == -1]


def _is_plain(param: tirx.Var, type_: tvm.ir.Type) -> bool:
    """Whether TVM would declare a tensor so; a scalar is always."""
    if not isinstance(type_, relax.TensorType):
        return True
    buffer, shape = param.ty, type_.shape
    declared = buffer.storage_scope, buffer.data_alignment, buffer.offset_factor, buffer.layout
    if declared != ("global", 64, 1, None) or len(buffer.strides):
        return False
    if not isinstance(shape, relax.ShapeExpr) or not tvm_ffi.structural_equal(
        buffer.elem_offset, _NO_OFFSET
    ):
        return False
    return tvm_ffi.structural_equal(buffer.shape, shape.values, map_free_vars=True)
