"""Refuse tensors and buffers whose elements take less than a byte, in Relax and TensorIR."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import DataType, IRModule, relax, tirx
from tvm.ir import GenericConst, PrimType, TupleType
from tvm.ir.transform import PassContext

from sits_tvm.diagnostics import Diagnostic, emit

_HELP = (
    "keep the values in int8 (R.clip to the 4-bit range), or ask for INT4 weights with "
    "Config(quant=QuantSpec()), which packs eight of them into a uint32"
)


@tvm.transform.module_pass(opt_level=0, name="CheckSubByteBuffers")
class CheckSubByteBuffers:
    """Emit what `check_sub_byte_buffers` finds; the module stays as it is.

    TVM generates CUDA code for int4 buffers that does not extract the nibble, and an int4 tensor
    on a CPU fails when it is allocated: both build without a word.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((8,), "int8")) -> R.Tensor((8,), "float32"):
                return R.astype(x, "float32")

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((8,), "int8")) -> R.Tensor((8,), "float32"):
                return R.astype(x, "float32")
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        for diagnostic in check_sub_byte_buffers(mod):
            emit(diagnostic)
        return mod


def check_sub_byte_buffers(mod: IRModule) -> list[Diagnostic]:
    """An error per parameter, binding, constant, buffer or cast of int4, int2, float4 and so on.

    Buffers are found in every scope: parameters, global, shared, local, warp.
    """
    found: list[Diagnostic] = []
    for gvar, func in mod.functions.items():
        if isinstance(func, relax.Function):
            found += _in_relax(gvar.name_hint, func)
        elif isinstance(func, tirx.PrimFunc):
            found += _in_prim_func(gvar.name_hint, func)
    return found


def _in_relax(name: str, func: relax.Function) -> Iterator[Diagnostic]:
    for param in func.params:
        for dtype in _sub_byte_dtypes(param.ty):
            yield _refuse(name, param.name, f"the parameter is a tensor of {dtype}")
    bindings: list[relax.Binding] = []
    kinds = (relax.VarBinding, relax.MatchCast)
    tvm_ffi.structural_walk(func, (kinds, bindings.append))
    for binding in bindings:
        op = _op_name(binding.value)
        for dtype in _sub_byte_dtypes(binding.var.ty):
            yield _refuse(name, binding.var.name, f"{op} makes a tensor of {dtype}", binding)
        for dtype in _constant_dtypes(binding.value):
            what = f"{op} reads a constant of {dtype}"
            yield _refuse(name, binding.var.name, what, binding)


def _constant_dtypes(value: relax.Expr) -> list[str]:
    found: list[str] = []
    if isinstance(value, relax.Call | relax.Tuple):
        parts = value.args if isinstance(value, relax.Call) else value.fields
        for part in parts:
            if isinstance(part, GenericConst):
                found += _sub_byte_dtypes(part.ty)
    return found


def _in_prim_func(name: str, func: tirx.PrimFunc) -> Iterator[Diagnostic]:
    places: dict[str, str] = {}

    def note_var(var: tirx.Var) -> None:
        if _is_sub_byte(dtype := _element(var.ty)):
            kind = f"buffer in scope {var.scope()}" if tirx.is_buffer_var(var) else "variable"
            places[var.name] = f"{var.name} is a {kind} of {dtype}"

    def note_cast(cast: tirx.Cast) -> None:
        if _is_sub_byte(dtype := _element(cast.ty)):
            places.setdefault(f"cast to {dtype}", f"a value is cast to {dtype}")

    tvm_ffi.structural_walk(func, [(tirx.Var, note_var), (tirx.Cast, note_cast)])
    for binding, found in places.items():
        yield _refuse(name, binding, found)


def _sub_byte_dtypes(ty: Any) -> list[str]:
    if isinstance(ty, TupleType):
        return [dtype for part in ty.fields for dtype in _sub_byte_dtypes(part)]
    dtype = _element(ty)
    return [dtype] if _is_sub_byte(dtype) else []


def _element(ty: Any) -> str:
    """The element type of a tensor, buffer or scalar; "" where there is none."""
    if isinstance(ty, PrimType):
        return str(ty.dtype)
    dtype = getattr(ty, "dtype", None)
    return "" if dtype is None else str(dtype)


def _is_sub_byte(dtype: str) -> bool:
    return bool(dtype) and dtype not in ("handle", "void") and DataType(dtype).bits % 8 != 0


def _op_name(value: relax.Expr) -> str:
    if not isinstance(value, relax.Call):
        return "the binding"
    name = getattr(value.op, "name", "") or getattr(value.op, "name_hint", "a call")
    if name == "relax.call_tir":
        return f"the call of {value.args[0].name_hint}"
    return name.replace("relax.", "R.", 1)


def _refuse(
    function: str, name: str, found: str, binding: relax.Binding | None = None
) -> Diagnostic:
    message = f"{found}: elements of less than a byte cannot be built right"
    lines = str(binding or "").splitlines()
    ir = "\n".join(line for line in lines if line.startswith(f"{name}:"))
    where = {"function": function, "binding": name, "ir": ir}
    return Diagnostic.error("sub-byte-buffer", message, help=_HELP, **where)
