"""`relax.sits.pack_weight`: the packed parts of a weight that is fake-quantized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from tvm import relax
from tvm.ir import Op

from tir_schedules.int4_format.packing import PackedLayout, Parts
from tir_schedules.quantization.arrange_groups import arrange_groups
from tir_schedules.quantization.pack_fake_quantized import (
    code_bounds,
    pack_fake_quantized,
    packed_layout,
)
from tir_schedules.quantization.quantize_weight import pack_codes, pack_zero_points

from ._affine import attributes_of, format_of
from ._register import register_op
from .fake_quantize import dequantize
from .int4 import call_prim_func, packed_types

NAME = "relax.sits.pack_weight"


def pack_weight(
    weight: relax.Expr,
    scale: relax.Expr,
    zero_point: relax.Expr | None = None,
    *,
    transposed: bool = False,
    order: str = "rows",
    **form: object,
) -> relax.Call:
    """Pack the weight of ``matmul(x, fake_quantize(weight, scale, zero_point))``, or the codes of
    ``matmul(x, dequantize(weight, scale, zero_point))``.

    Parameters
    ----------
    weight : Tensor (n, k), or (k, n) when `transposed`
        float16, bfloat16 or float32; int8 or uint8 are codes.
    scale, zero_point
        As `fake_quantize` takes them.
    transposed : bool
    order : str
        See `tir_schedules.int4_format.packing`.
    **form
        The attributes of the `fake_quantize`.

    Returns
    -------
    Call
        Of type Tuple(codes, scale) or, where there is a zero point or codes are unsigned,
        Tuple(codes, scale, zero_point), in the layout of `pack_fake_quantized.packed_layout`.
    """
    args = [arg for arg in (weight, scale, zero_point) if arg is not None]
    return relax.Call(Op.get(NAME), args, {**form, "transposed": transposed, "order": order})


def layout_of_call(call: relax.Call) -> PackedLayout:
    """The layout that a call packs into; ValueError where there is none."""
    weight, scale = (arg.ty for arg in call.args[:2])
    rows, columns = (int(extent) for extent in weight.shape)
    return packed_layout(
        format_of(call),
        (rows, columns),
        scale.ndim,
        transposed=bool(call.attrs["transposed"]),
        scale_dtype=str(scale.dtype),
        has_zero_point=len(call.args) == 3,
        order=str(call.attrs["order"]),
    )


def evaluate(call: relax.Call, arrays: Sequence[np.ndarray]) -> Parts:
    """What a call returns for the elements of its arguments, in NumPy; ValueError on bad ones."""
    shapes = ([int(extent) for extent in arg.ty.shape] for arg in call.args)
    weight, scale, *rest = (a.reshape(s) for a, s in zip(arrays, shapes, strict=True))
    zero_point = rest[0] if rest else None
    transposed = bool(call.attrs["transposed"])
    layout = layout_of_call(call)
    return pack_fake_quantized(
        weight, scale, zero_point, format_of(call), layout, transposed=transposed
    )


def _infer(call: relax.Call, _: relax.BlockBuilder) -> relax.TupleType:
    return relax.TupleType(packed_types(layout_of_call(call)))


def _legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    layout, form = layout_of_call(call), format_of(call)
    weight, *parameters = call.args
    transposed = bool(call.attrs["transposed"])
    if str(weight.ty.dtype) in ("int8", "uint8"):
        weight = bb.emit(dequantize(*call.args, out_dtype="float32", **attributes_of(call)))
    arrange = partial(arrange_groups, form, layout, transposed)
    arranged = bb.emit(bb.call_te(arrange, *parameters, primfunc_name_hint="arrange_groups"))
    scale, zero = (bb.emit(relax.TupleGetItem(arranged, i)) for i in (0, 1))
    if transposed:
        weight = bb.emit(relax.op.permute_dims(weight))
    types = packed_types(layout)
    kernel = pack_codes(layout, str(weight.ty.dtype), code_bounds(form))
    parts = [call_prim_func(bb, kernel, "pack_codes", [weight, scale, zero], types[0]), scale]
    if not layout.spec.symmetric:
        kernel = pack_zero_points(layout)
        parts.append(call_prim_func(bb, kernel, "pack_zero_points", [zero], types[2]))
    return relax.Tuple(parts)


register_op(NAME, _infer, pack_weight, legalize=_legalize)
