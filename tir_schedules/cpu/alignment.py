"""Accept tensors that start anywhere. Runs last among the kernel passes, for CPUs.

TVM compiles loads for tensors aligned to 64 bytes, and its VM hands NumPy arrays over as they are:
NumPy aligns to 16. Such an array would end the process.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import IRModule, Var
from tvm.ir.transform import PassContext, module_pass
from tvm.tirx.buffer import is_buffer_var


@module_pass(opt_level=0, name="AcceptUnalignedTensors")
class AcceptUnalignedTensors:
    """Declare the arguments of each PrimFunc as aligned to their elements, no more.

    An x86 or Arm CPU loads a vector that is aligned by chance as fast as one declared so.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        functions = {
            var: _unaligned(func) if isinstance(func, tirx.PrimFunc) else func
            for var, func in mod.functions_items()
        }
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _unaligned(func: tirx.PrimFunc) -> tirx.PrimFunc:
    new = {param: _redeclared(param) for param in func.params if is_buffer_var(param)}
    return tvm_ffi.structural_map(func, [(Var, lambda var: new.get(var, var))], order="post")


def _redeclared(buffer: tirx.Buffer) -> tirx.Buffer:
    ty = buffer.ty
    element = max(1, tvm.DataType(str(ty.dtype)).bits // 8)
    return tirx.decl_buffer(
        list(ty.shape), ty.dtype, buffer.name, None, list(ty.strides), ty.elem_offset,
        buffer.scope(), element, ty.offset_factor, layout=ty.layout,
    )  # fmt: skip
