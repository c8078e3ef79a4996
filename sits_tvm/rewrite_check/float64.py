"""A function in float64: the same ops, computed more exactly."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst

from relax_passes._adjoint import bindings_of

_FLOATS = ("float16", "bfloat16", "float32")


def in_float64(mod: IRModule) -> IRModule:
    """``main`` of `mod`, one dataflow block, with float64 for every other float dtype.

    That of arguments, constants and attributes; casts between floats become nothing.
    """
    func, bb = mod["main"], relax.BlockBuilder()
    params = [relax.Var(param.name, _wide_type(param.ty)) for param in func.params]
    values: dict[relax.Var, relax.Expr] = dict(zip(func.params, params, strict=True))
    with bb.function("main", params):
        with bb.dataflow():
            for binding in bindings_of(func):
                values[binding.var] = bb.emit(_wide(binding.value, values))
            result = bb.emit_output(values[func.body.body])
        bb.emit_func_output(result)
    return bb.get()


def _wide(expr: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    if isinstance(expr, relax.Var):
        return values.get(expr, expr)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_wide(field, values) for field in expr])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(_wide(expr.tuple_value, values), expr.index)
    if isinstance(expr, GenericConst):
        if str(expr.ty.dtype) not in _FLOATS:
            return expr
        return relax.const(expr.value.numpy().astype(np.float64), "float64")
    if isinstance(expr, relax.Call):
        args = [_wide(arg, values) for arg in expr.args]
        return relax.Call(expr.op, args, _wide_attrs(expr.attrs), [])
    return expr


def _wide_type(ty: tvm.ir.Type) -> tvm.ir.Type:
    if isinstance(ty, relax.TupleType):
        return relax.TupleType([_wide_type(field) for field in ty.fields])
    if isinstance(ty, relax.TensorType) and str(ty.dtype) in _FLOATS:
        return relax.TensorType(ty.shape, "float64")
    return ty


def _wide_attrs(attrs: tvm.ir.Attrs | None) -> tvm.ir.Attrs | None:
    if attrs is None:
        return None
    if isinstance(attrs, tvm.ir.DictAttrs):
        return tvm.ir.make_node("ir.DictAttrs", **{k: _wide_value(v) for k, v in attrs.items()})
    info = type(attrs).__tvm_ffi_type_info__
    values = {field.name: _wide_value(getattr(attrs, field.name)) for field in info.fields}
    return tvm.ir.make_node(info.type_key, **values)


def _wide_value(value: object) -> object:
    return "float64" if str(value) in _FLOATS else value
