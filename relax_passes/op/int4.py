"""Ops on INT4 weights: `quantize_weight`, `int4_matmul`, `int4_take`.

A packed weight is the pair (codes, scale) or the triple (codes, scale, zero_point) that
`tir_schedules.int4_format.packing` defines. Its format travels as attributes of the call: the
fields of a `QuantSpec`, the logical shape n, k, and the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Op

from sits_tvm.config import INTEGER_ACTIVATIONS, QuantSpec
from tir_schedules.int4_format.activation_format import ActivationFormat, scale_columns
from tir_schedules.int4_format.packing import PackedLayout
from tir_schedules.matmul import int4_matmul as kernels
from tir_schedules.matmul.int4_matmul import Rows
from tir_schedules.matmul.int8_matmul import int8_matmul, quantize_activation
from tir_schedules.quantization.quantize_weight import choose_scale, pack_codes, pack_zero_points

from ._affine import FLOATS
from ._register import register_op

_SPEC_ATTRS = ("bits", "group_size", "symmetric", "scale_dtype")
_OUT_ELEMENTWISE_FUSABLE, _OPAQUE = 4, 8  # relax.op_pattern: elementwise consumers may join, or not


def quantize_weight(
    *weights: relax.Expr, transposed: bool = False, scale_method: str = "absmax", **layout: object
) -> relax.Call:
    """Quantize and pack a weight, or several as one, stacked along n.

    Parameters
    ----------
    *weights : Tensor (n, k), or (k, n) when `transposed`
        float16, bfloat16 or float32, all of one; each n but the last is whole tiles.
    scale_method : str
        As in `QuantSpec`.
    **layout
        What `layout_attrs` gives: n, k, order, bits, group_size, symmetric, scale_dtype.

    Returns
    -------
    Call
        Of type Tuple(codes, scale) or Tuple(codes, scale, zero_point).
    """
    attrs = {**layout, "transposed": transposed, "scale_method": scale_method}
    return relax.Call(Op.get("relax.sits.quantize_weight"), list(weights), attrs)


def int4_matmul(x: relax.Expr, *packed: relax.Expr, **layout: object) -> relax.Call:
    """``x @ W.T`` of a float tensor x (..., k) and the parts of a packed weight W (n, k).

    Accumulates in float32; the result (..., n) has the dtype of x. `layout` as above; with
    activation="int8" or "int4" among it, x is quantized, see `int8_matmul`; with
    "bfloat16" it is rounded to that.
    """
    return relax.Call(Op.get("relax.sits.int4_matmul"), [x, *packed], layout)


def int4_take(
    indices: relax.Expr, *packed: relax.Expr, out_dtype: str = "float32", **layout: object
) -> relax.Call:
    """Rows of a packed table (n, k): integer indices (...) in 0…n-1 to (..., k) of `out_dtype`."""
    attrs = {**layout, "out_dtype": out_dtype}
    return relax.Call(Op.get("relax.sits.int4_take"), [indices, *packed], attrs)


def layout_attrs(layout: PackedLayout) -> dict[str, object]:
    """The attributes by which these ops carry a packed layout."""
    spec = {name: getattr(layout.spec, name) for name in _SPEC_ATTRS}
    if layout.spec.activation is not None:
        spec["activation"] = layout.spec.activation
    if layout.spec.activation_scale != "absmax":
        spec["activation_scale"] = layout.spec.activation_scale
    return {"n": layout.n, "k": layout.k, "order": layout.order, **spec}


def layout_of(call: relax.Call) -> PackedLayout:
    """The packed layout that a call of these ops describes."""
    attrs = call.attrs
    activation = attrs.get("activation")
    spec = QuantSpec(
        bits=int(attrs["bits"]),
        group_size=int(attrs["group_size"]),
        symmetric=bool(attrs["symmetric"]),
        scale_dtype=str(attrs["scale_dtype"]),
        activation=None if activation is None else str(activation),
        activation_scale=str(attrs.get("activation_scale", "absmax")),
        scale_method=str(attrs.get("scale_method", "absmax")),
    )
    return PackedLayout(int(attrs["n"]), int(attrs["k"]), spec, str(attrs["order"]))


def packed_types(layout: PackedLayout) -> list[relax.TensorType]:
    """The types of the parts of a packed weight."""
    return [
        relax.TensorType(list(shape), dtype)
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    ]


def _infer_quantize_weight(call: relax.Call, _: relax.BlockBuilder) -> relax.TupleType:
    layout, axis = layout_of(call), int(bool(call.attrs["transposed"]))
    tile = layout.unit.rows
    dtypes, rows = FLOATS, []
    for arg in call.args:
        ty = _expect(call, "weight", arg, None, dtypes)
        dtypes = (str(ty.dtype),)
        rows.append(int(ty.shape[axis]) if ty.ndim == 2 else 0)
        _expect(call, "weight", arg, (layout.k, rows[-1]) if axis else (rows[-1], layout.k), dtypes)
    if sum(rows) != layout.n or any(n % tile for n in rows[:-1]):
        raise ValueError(
            f"{call.op.name}: n={layout.n} in tiles of {tile} channels, of weights of {rows}"
        )
    return relax.TupleType(packed_types(layout))


def _infer_int4_matmul(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    layout = layout_of(call)
    x = _expect(call, "x", call.args[0], None, FLOATS)
    if x.ndim < 1 or x.shape is None or x.shape[-1] != layout.k:
        raise ValueError(f"relax.sits.int4_matmul: x is {x}, its last axis must have k={layout.k}")
    _expect_packed(call, layout)
    return relax.TensorType([*list(x.shape)[:-1], layout.n], str(x.dtype))


def _infer_int4_take(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    layout = layout_of(call)
    indices = _expect(call, "indices", call.args[0], None, ("int32", "int64"))
    _expect_packed(call, layout)
    return relax.TensorType([*indices.shape, layout.k], str(call.attrs["out_dtype"]))


def _expect_packed(call: relax.Call, layout: PackedLayout) -> None:
    parts = call.args[1:]
    if len(parts) != len(layout.names):
        raise ValueError(f"{call.op.name}: expected the parts {layout.names}, got {len(parts)}")
    for name, arg, shape, dtype in zip(
        layout.names, parts, layout.shapes, layout.dtypes, strict=True
    ):
        _expect(call, name, arg, shape, (dtype,))


def _expect(
    call: relax.Call,
    name: str,
    arg: relax.Expr,
    shape: tuple[int, ...] | None,
    dtypes: tuple[str, ...],
) -> relax.TensorType:
    ty = arg.ty
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in dtypes:
        raise TypeError(
            f"{call.op.name}: {name} must be a tensor of {' or '.join(dtypes)}, got {ty}"
        )
    if shape is not None and (ty.shape is None or tuple(ty.shape) != shape):
        raise ValueError(f"{call.op.name}: {name} must have shape {shape}, got {ty}")
    return ty


def _legalize_quantize_weight(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    layout = layout_of(call)
    transposed = bool(call.attrs["transposed"])
    weight, *others = call.args
    if others:
        weight = bb.emit(relax.op.concat([weight, *others], axis=int(transposed)))
    if transposed:
        weight = bb.emit(relax.op.permute_dims(weight))
    dtype, types = str(weight.ty.dtype), packed_types(layout)
    zero_type = relax.TensorType(list(layout.shapes[1]), "uint8")

    chosen = call_prim_func(
        bb, choose_scale(layout, dtype), "choose_scale", [weight], [types[1], zero_type]
    )
    scale, zero = (bb.emit(relax.TupleGetItem(chosen, i)) for i in (0, 1))
    kernel = pack_codes(layout, dtype)
    parts = [call_prim_func(bb, kernel, "pack_codes", [weight, scale, zero], types[0]), scale]
    if not layout.spec.symmetric:
        parts.append(
            call_prim_func(bb, pack_zero_points(layout), "pack_zero_points", [zero], types[2])
        )
    return relax.Tuple(parts)


def _legalize_int4_matmul(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x, *packed = call.args
    layout, dtype = layout_of(call), str(x.ty.dtype)
    *rows, _ = x.ty.shape
    x = x if rows else _reshape(bb, x, [1, layout.k])
    extents = rows or [1]
    if layout.spec.activation not in INTEGER_ACTIVATIONS:
        name, make, operands = "int4_matmul", _matmul_kernel, [x]
    else:
        name = "int4_int4_matmul" if layout.spec.activation == "int4" else "int8_matmul"
        make, operands = _int8_kernel, _quantized(bb, x, layout)
    kernel = _fusable(make(_static(extents), layout, dtype), extents)
    out = relax.TensorType([*extents, layout.n], dtype)
    y = call_prim_func(bb, kernel, name, [*operands, *packed], out)
    return y if rows else _reshape(bb, y, [layout.n])


def _quantized(bb: relax.BlockBuilder, x: relax.Expr, layout: PackedLayout) -> list[relax.Expr]:
    """Codes, scales and sums of x (..., k), see `int8_matmul`."""
    *rows, k = x.ty.shape
    form, dtype = ActivationFormat.of(layout), str(x.ty.dtype)
    kernel = _quantize_kernel(_static(rows), int(k), layout.group_size, dtype, form)
    scales = layout.padded_k // scale_columns(int(k), layout.group_size)
    types = [
        relax.TensorType([*rows, form.words(layout.padded_k)], "int32"),
        relax.TensorType([*rows, scales], "float32"),
        relax.TensorType([*rows, layout.groups], "int32"),
    ]
    opaque = kernel.with_attr("op_pattern", _OPAQUE)
    parts = call_prim_func(bb, opaque, "quantize_activation", [x], types)
    return [bb.emit(relax.TupleGetItem(parts, i)) for i in range(len(types))]


def _legalize_int4_take(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    indices, *packed = call.args
    layout, dtype = layout_of(call), str(call.attrs["out_dtype"])
    shape = list(indices.ty.shape)
    indices = indices if shape else _reshape(bb, indices, [1])
    extents = shape or [1]
    kernel = _take_kernel(_static(extents), layout, dtype, str(indices.ty.dtype))
    out = relax.TensorType([*extents, layout.k], dtype)
    rows = call_prim_func(bb, _fusable(kernel, extents), "int4_take", [indices, *packed], out)
    return rows if shape else _reshape(bb, rows, [layout.k])


def _fusable(kernel: tirx.PrimFunc, extents: Sequence[object]) -> tirx.PrimFunc:
    """FuseTIR does not match the kernel's own symbol of an extent with a sum or a product."""
    plain = all(_is_constant(e) or tvm.ir.is_prim_var(e) for e in extents)
    return kernel.with_attr("op_pattern", _OUT_ELEMENTWISE_FUSABLE if plain else _OPAQUE)


# A model holds the same kernel once per layer: make it once.
@lru_cache(maxsize=512)
def _matmul_kernel(rows: Rows, layout: PackedLayout, dtype: str) -> tirx.PrimFunc:
    return kernels.int4_matmul(rows, layout.n, layout.k, layout.spec, dtype, layout.order)


@lru_cache(maxsize=64)
def _take_kernel(count: Rows, layout: PackedLayout, dtype: str, index_dtype: str) -> tirx.PrimFunc:
    return kernels.int4_take(
        count, layout.n, layout.k, layout.spec, dtype, layout.order, index_dtype
    )


_int8_kernel = lru_cache(maxsize=512)(int8_matmul)
_quantize_kernel = lru_cache(maxsize=64)(quantize_activation)


def call_prim_func(
    bb: relax.BlockBuilder,
    kernel: tirx.PrimFunc,
    name: str,
    args: Sequence[relax.Expr],
    out: object,
) -> relax.Expr:
    private = kernel.without_attr("global_symbol")
    return bb.emit(relax.call_tir(bb.add_func(private, name), list(args), out))


def _reshape(bb: relax.BlockBuilder, x: relax.Expr, shape: Sequence[object]) -> relax.Expr:
    return bb.emit(relax.op.reshape(x, relax.ShapeExpr(list(shape))))


def _static(extents: Sequence[Any]) -> Rows:
    """The extents, None for what is not a constant."""
    return tuple(int(extent) if _is_constant(extent) else None for extent in extents)


def _is_constant(extent: object) -> bool:
    return isinstance(extent, int | tirx.IntImm)


register_op(
    "relax.sits.quantize_weight",
    _infer_quantize_weight,
    quantize_weight,
    legalize=_legalize_quantize_weight,
)
register_op(
    "relax.sits.int4_matmul", _infer_int4_matmul, int4_matmul, legalize=_legalize_int4_matmul
)
register_op("relax.sits.int4_take", _infer_int4_take, int4_take, legalize=_legalize_int4_take)
