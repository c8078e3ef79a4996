"""Tell kernels how large their symbolic extents become. Runs after FuseTIR, on calls of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar, IRModule
from tvm.ir.transform import PassContext
from tvm.sym import ConstIntBound

from tir_schedules.records.space import UPPER_BOUNDS

from .index_analysis.dim_bounds import bounded_analyzer

_CALL_TIR = "relax.call_tir"
_LARGEST = 2**31 - 1
"""Of the bounds that tell anything."""


@tvm.transform.module_pass(opt_level=0, name="BoundKernelExtents")
class BoundKernelExtents:
    """Attach to each PrimFunc the largest values of its symbolic extents.

    It needs no code for more. The functions that call it have them as ``tir_var_upper_bound``.

    Leaves alone: an extent that has no bound in one of the calls, and PrimFuncs that are also
    called in other ways than by ``R.call_tir``.

    Before::

        @I.ir_module
        class Before:
            @T.prim_func(private=True, s_tir=True)
            def twice(x: T.handle, y: T.handle):
                m = T.int64()
                X, Y = T.match_buffer(x, (m, 4)), T.match_buffer(y, (m, 4))
                for i, j in T.grid(m, 4):
                    with T.sblock("twice"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        Y[vi, vj] = X[vi, vj] + X[vi, vj]

            @R.function
            def main(x: R.Tensor(("s", 4), "float32")):
                s = T.int64()
                R.func_attr({"tir_var_upper_bound": {"s": 8}})
                cls = Before
                with R.dataflow():
                    y = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((s, 4), "float32"))
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @T.prim_func(private=True, s_tir=True)
            def twice(x: T.handle, y: T.handle):
                T.func_attr({"sits.upper_bounds": {"m": 8}})
                m = T.int64()
                X, Y = T.match_buffer(x, (m, 4)), T.match_buffer(y, (m, 4))
                for i, j in T.grid(m, 4):
                    with T.sblock("twice"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        Y[vi, vj] = X[vi, vj] + X[vi, vj]

            @R.function
            def main(x: R.Tensor(("s", 4), "float32")):
                s = T.int64()
                R.func_attr({"tir_var_upper_bound": {"s": 8}})
                cls = After
                with R.dataflow():
                    y = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((s, 4), "float32"))
                    R.output(y)
                return y
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        largest: dict[GlobalVar, dict[str, int]] = {}
        for func in mod.functions.values():
            if isinstance(func, relax.Function):
                for kernel, name, most in _extents_of_calls(mod, func):
                    known = largest.setdefault(kernel, {})
                    known[name] = max(known.get(name, 0), most)
        out = mod.clone()
        for kernel, extents in largest.items():
            bounds = {name: most for name, most in extents.items() if most <= _LARGEST}
            if bounds:
                out[kernel] = mod[kernel].with_attr(UPPER_BOUNDS, bounds)
        return out


def _extents_of_calls(mod: IRModule, func: relax.Function) -> Iterator[tuple[GlobalVar, str, int]]:
    """Kernel, name of a symbolic extent, and its largest value, for each extent of each call."""
    calls: list[relax.Call] = []
    tvm_ffi.structural_walk(func.body, (relax.Call, calls.append))
    analyzer = bounded_analyzer(func)
    for call in calls:
        kernel = call.op if isinstance(call.op, GlobalVar) else next(iter(call.args), None)
        if not isinstance(kernel, GlobalVar) or not isinstance(mod[kernel], tirx.PrimFunc):
            continue
        is_plain = getattr(call.op, "name", "") == _CALL_TIR
        types = [arg.ty for arg in call.args[1]] + _outputs(call) if is_plain else []
        for i, buffer in enumerate(mod[kernel].params):
            for axis, extent in enumerate(getattr(buffer, "shape", ())):
                if isinstance(extent, tirx.Var):
                    at = types[i].shape[axis] if i < len(types) else None
                    bound = None if at is None else analyzer.const_int_bound(at)
                    most = ConstIntBound.POS_INF if bound is None else bound.max_value
                    yield kernel, extent.name, int(most)


def _outputs(call: relax.Call) -> list[relax.TensorType]:
    (out,) = call.ty_args
    return list(out.fields) if isinstance(out, relax.TupleType) else [out]
