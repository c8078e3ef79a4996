"""Say which products with an INT4 weight get a kernel of TVM's. Runs before ApplySchedules."""

from __future__ import annotations

import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import BaseFunc, IRModule
from tvm.ir.transform import PassContext, module_pass
from tvm.target import Target

from sits_tvm.diagnostics import Diagnostic, emit

from ..empty_tensors import is_empty
from ..matmul.int4_matmul import DEQUANTIZE
from ..matmul.int8_matmul import INT8_DOT
from ..matmul.recognise import recognise
from .refusals import Refusal, refused_product, refused_target

REASON = "sits.reason"
"""The attribute of a PrimFunc that tells why its kernel is none of ours."""


@module_pass(opt_level=0, name="ExplainFallbacks")
class ExplainFallbacks:
    """Attach ``sits.reason`` to each product that `TensorCoreMatmul` refuses, with a note per call.

    For targets other than llvm, whose rule takes all that `TensorCoreMatmul` refuses.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        target = Target.current(allow_none=False)
        refusals = {
            var.name_hint: refusal
            for var, func in mod.functions_items()
            if (refusal := _refusal(func, target)) is not None
        }
        if not refusals:
            return mod
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function):
                _note_calls(var.name_hint, func, refusals)
        functions = {
            var: func.with_attr(REASON, refusals[var.name_hint].reason)
            if var.name_hint in refusals
            else func
            for var, func in mod.functions_items()
        }
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _refusal(func: BaseFunc, target: Target) -> Refusal | None:
    if not isinstance(func, tirx.PrimFunc) or not _has_int4_weight(func) or is_empty(func):
        return None
    return refused_target(target) or refused_product(recognise(func, "fragments"))


def _has_int4_weight(func: tirx.PrimFunc) -> bool:
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, found.append))
    return any(name in block.annotations for block in found for name in (DEQUANTIZE, INT8_DOT))


def _note_calls(name: str, func: relax.Function, refusals: dict[str, Refusal]) -> None:
    def note(binding: relax.VarBinding) -> None:
        value = binding.value
        kernel = value.args[0] if isinstance(value, relax.Call) and value.args else None
        if isinstance(kernel, relax.GlobalVar) and kernel.name_hint in refusals:
            refusal = refusals[kernel.name_hint]
            message = f"{kernel.name_hint} gets a kernel of TVM's: {refusal.reason}"
            where = {"function": name, "binding": binding.var.name, "help": refusal.help}
            line = str(binding).splitlines()[-1]  # before it are its variables
            emit(Diagnostic.note("int4-fallback", message, ir=line, **where))

    tvm_ffi.structural_walk(func.body, (relax.VarBinding, note))
