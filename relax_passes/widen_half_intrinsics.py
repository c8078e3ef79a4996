"""Compute half-precision functions that CUDA or LLVM lacks in float32. Runs after LegalizeOps.
Leaves alone: float32, float64, and the functions that CUDA has for both half types."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import IRModule, tirx
from tvm.ir import Call, Op, PrimType
from tvm.ir.transform import PassContext

_HALF = ("float16", "bfloat16")
# For these TVM emits a name that no CUDA header declares (hnearbyint, hsinh), one that narrows
# bfloat16 to float16 (htan), or nothing (acos); LLVM lacks most of them in half precision too.
# CUDA has the others for both half types, as hexp, hrint and so on.
_WIDENED = {
    *("nearbyint", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh"),
    *("erf", "log1p", "pow", "fmod", "atan2", "hypot", "copysign", "sigmoid"),
}


@tvm.transform.module_pass(opt_level=0, name="WidenHalfIntrinsics")
class WidenHalfIntrinsics:
    """Cast the arguments of a half-precision intrinsic to float32 and its result back.

    The result is the float32 value rounded once, so it is at least as exact as a function in half
    precision would be; rounding functions give the same value. `nextafter`, whose result depends
    on the type, is left alone.

    Before::

        @I.ir_module
        class Before:
            @T.prim_func(s_tir=True)
            def main(x: T.Buffer((8,), "float16"), y: T.Buffer((8,), "float16")):
                for i in range(8):
                    with T.sblock("round"):
                        v = T.axis.spatial(8, i)
                        y[v] = T.nearbyint(x[v])

    After::

        @I.ir_module
        class After:
            @T.prim_func(s_tir=True)
            def main(x: T.Buffer((8,), "float16"), y: T.Buffer((8,), "float16")):
                for i in range(8):
                    with T.sblock("round"):
                        v = T.axis.spatial(8, i)
                        y[v] = T.Cast("float16", T.nearbyint(T.Cast("float32", x[v])))
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        changed = {}
        for gvar, func in mod.functions.items():
            if isinstance(func, tirx.PrimFunc):
                body = tvm_ffi.structural_map(func.body, [(Call, _widen), (tirx.Mod, _widen_mod)])
                if not body.same_as(func.body):
                    changed[gvar] = func.with_body(body)
        if not changed:
            return mod
        result = mod.clone()
        result.update(changed)
        return result


def _widen(call: Call) -> tirx.Expr:
    if not isinstance(call.op, Op) or not _is_half(call):
        return call
    name = call.op.name
    if name.removeprefix("tirx.") not in _WIDENED:
        return call
    wide = tirx.call_intrin("float32", name, *(tirx.Cast("float32", arg) for arg in call.args))
    return tirx.Cast(str(call.ty.dtype), wide)


def _widen_mod(mod: tirx.Mod) -> tirx.Expr:
    if not _is_half(mod):
        return mod
    wide = tirx.Mod(tirx.Cast("float32", mod.a), tirx.Cast("float32", mod.b))
    return tirx.Cast(str(mod.ty.dtype), wide)


def _is_half(expr: tirx.Expr) -> bool:
    return isinstance(expr.ty, PrimType) and str(expr.ty.dtype) in _HALF
