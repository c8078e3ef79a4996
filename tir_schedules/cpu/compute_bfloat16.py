"""Compute bfloat16 in float32. Runs after the schedules, for CPUs.

TVM's own expansion of a cast to bfloat16 repeats its argument: an error or wrong numbers where the
argument binds variables, twice the work elsewhere. Nor can it store a vector of equal elements.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, IRModule, PrimType, TensorLoad, Var
from tvm.ir.transform import PassContext, module_pass
from tvm.tirx import Expr, For, ForKind
from tvm.tirx.buffer import is_buffer_var

from ..tir_nodes import collect, uses

_NARROW, _WIDE = "bfloat16", "float32"
_BINARY = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.Max, tirx.Min)


@module_pass(opt_level=0, name="ComputeBfloat16")
class ComputeBfloat16:
    """Load bfloat16 arguments as float32, compute so, and round what is cast or stored, by bits.

    Local buffers become float32. Results inside an expression are not rounded until a cast says so.
    Loops that store the same value in all lanes are not vectorized here; LLVM does it.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        functions = {
            var: _computed_wide(func) if isinstance(func, tirx.PrimFunc) else func
            for var, func in mod.functions_items()
        }
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def bfloat16_bits(x: Expr) -> Expr:
    """uint16 bits of float32 `x`, a variable, rounded to bfloat16; ties to even, NaN stays NaN."""
    bits = tirx.reinterpret("uint32", x)
    up = bits + _bits(0x7FFF) + (tirx.shift_right(bits, _bits(16)) & _bits(1))
    is_nan = (bits & _bits(0x7FFFFFFF)) > _bits(0x7F800000)
    rounded = tirx.Select(is_nan, bits | _bits(0x400000), up)
    return tirx.shift_right(rounded, _bits(16)).astype("uint16")


def float32_of(bits: Expr) -> Expr:
    """The bfloat16 of these uint16 bits."""
    return tirx.reinterpret(_WIDE, tirx.shift_left(bits.astype("uint32"), _bits(16)))


def _bits(value: int) -> Expr:
    return tirx.const(value, "uint32")


def _computed_wide(func: tirx.PrimFunc) -> tirx.PrimFunc:
    body = tvm_ffi.structural_map(func.body, (For, _without_vectors), order="post")
    local = {var: _wide_buffer(var) for var in collect(body, Var) if _is_local(var, func)}
    rules = [(Var, lambda var: local.get(var, var)), *_RULES]
    body = tvm_ffi.structural_map(body, rules, order="post")
    return func if body.same_as(func.body) else func.with_body(body)


def _without_vectors(loop: For) -> For:
    stores = collect(loop, tirx.BufferStore) if loop.kind == ForKind.VECTORIZED else []
    if any(_is_repeated(store, loop.loop_var) for store in stores):
        return For(loop.loop_var, loop.min, loop.extent, ForKind.SERIAL, loop.body)
    return loop


def _is_repeated(store: tirx.BufferStore, lane: Var) -> bool:
    """Whether all lanes get the same bfloat16."""
    return str(store.buffer.dtype) == _NARROW and not uses(store.value, lane)


def _is_local(var: Var, func: tirx.PrimFunc) -> bool:
    is_narrow = is_buffer_var(var) and str(var.ty.dtype) == _NARROW
    return is_narrow and not any(var.same_as(param) for param in func.params)


def _wide_buffer(buffer: tirx.Buffer) -> tirx.Buffer:
    return tirx.decl_buffer(list(buffer.ty.shape), _WIDE, buffer.name, scope=buffer.scope())


def _store(store: tirx.BufferStore) -> tirx.Stmt:
    value = store.value
    if str(store.buffer.dtype) != _NARROW:
        return store
    narrow = tirx.reinterpret(_NARROW, _bfloat16_bits_of(value))
    return tirx.BufferStore(store.buffer, narrow, store.indices)


def _bfloat16_bits_of(value: Expr) -> Expr:
    wide = tirx.Var("wide", _WIDE)
    return tirx.Let(wide, value, bfloat16_bits(wide))


def _cast(cast: tirx.Cast) -> Expr:
    value = cast.value
    if _is_narrow(cast):
        return float32_of(_bfloat16_bits_of(value.astype(_WIDE)))
    return value if value.ty == cast.ty else cast


def _load(load: TensorLoad) -> Expr:
    if not _is_narrow(load):
        return load
    if str(load.source.ty.dtype) == _WIDE:
        return tirx.BufferLoad(load.source, load.indices)
    return float32_of(tirx.reinterpret("uint16", load))


def _constant(constant: tirx.FloatImm) -> Expr:
    return tirx.const(constant.value, _WIDE) if _is_narrow(constant) else constant


def _binary(node: Expr) -> Expr:
    return type(node)(node.a, node.b) if _is_narrow(node) else node


def _select(node: tirx.Select) -> Expr:
    wide = tirx.Select(node.condition, node.true_value, node.false_value)
    return wide if _is_narrow(node) else node


def _let(node: tirx.Let) -> Expr:
    return tirx.Let(node.var, node.value, node.body) if _is_narrow(node) else node


def _call(call: Call) -> Expr:
    if not _is_narrow(call):
        return call
    return tirx.call_intrin(_WIDE, call.op.name, *call.args)


def _is_narrow(expr: Expr) -> bool:
    return isinstance(expr.ty, PrimType) and str(expr.ty.dtype) == _NARROW


_RULES = [
    (tirx.BufferStore, _store), (tirx.Cast, _cast), (TensorLoad, _load), (tirx.FloatImm, _constant),
    (_BINARY, _binary), (tirx.Select, _select), (tirx.Let, _let), (Call, _call),
]  # fmt: skip
