"""Gradients of the quantization ops, of every order.

`fake_quantize_grad`, the product with the transposed Jacobian, is one kernel;
`fake_quantize_tangent`, with the Jacobian, is its transpose. The rest is plain Relax around three
small ops: `range_mask`, `expand_scale` (a scale for every element) and its transpose `sum_groups`.
The second derivatives are those of the straight-through surrogate
y = (clamp(ste(x / s) + z', lo, hi) - z') s: all zero but d²y / ds dz = -1 where x is clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from tvm import relax
from tvm.ir import Op
from tvm.relax import op as R
from tvm.relax.op.grad import no_grad

from relax_passes.op._affine import (
    FLOATS,
    call_kernel,
    format_attributes,
    format_of,
    legalize_with,
    raise_problems,
    same_shape,
    show,
    tensor_problems,
    validate,
    with_dtype,
)
from relax_passes.op._register import register_op
from tir_schedules import fake_quantize as kernels

Builder: TypeAlias = relax.BlockBuilder
Partials: TypeAlias = list[relax.Expr]


def fake_quantize_grad(*args: relax.Expr, **attributes: Any) -> relax.Call:
    """R.sits.fake_quantize_grad(gy, x, scale[, zero_point]) -> Tuple(dx, ds[, dz]).

    dz is there for a float zero point.
    """
    return _call("fake_quantize_grad", args, attributes)


def fake_quantize_tangent(*args: relax.Expr, **attributes: Any) -> relax.Call:
    """R.sits.fake_quantize_tangent(tx, ts, [tz,] x, scale[, zero_point]) -> dy.

    The change of y along the tangents tx, ts and, for a float zero point, tz.
    """
    return _call("fake_quantize_tangent", args, attributes)


def range_mask(*args: relax.Expr, part: str = "inside", **attributes: Any) -> relax.Call:
    """R.sits.range_mask(x, scale[, zero_point]): where x is "inside" the range, or "clipped"; bool.

    A NaN is neither.
    """
    return _call("range_mask", args, {**attributes, "part": part})


def expand_scale(scale: relax.Expr, x: relax.Expr, **attributes: Any) -> relax.Call:
    """R.sits.expand_scale(scale, x): the scale of every element of x, float32."""
    return _call("expand_scale", (scale, x), attributes)


def sum_groups(x: relax.Expr, scale: relax.Expr, **attributes: Any) -> relax.Call:
    """R.sits.sum_groups(x, scale): the sum of the elements that share each scale, float32."""
    return _call("sum_groups", (x, scale), attributes)


def of_fake_quantize(_: relax.Var, call: relax.Call, gy: relax.Var, bb: Builder) -> Partials:
    """The partials of `fake_quantize`: one kernel."""
    partials = bb.emit(fake_quantize_grad(gy, *call.args, **_attributes(call)))
    count = len(partials.ty.fields)
    found = [bb.emit(relax.TupleGetItem(partials, i)) for i in range(count)]
    return [*found, *map(no_grad, call.args[count:])]


def of_quantize(_: relax.Var, call: relax.Call, h: relax.Var, bb: Builder) -> Partials:
    """dx = h M / s, ds = -sum(h M x / s²), dz = sum(h M)."""
    x, scale, *zero_point = call.args
    attributes = _attributes(call)
    inside = bb.emit(range_mask(*call.args, **attributes))
    step = bb.emit(expand_scale(scale, x, **attributes))
    h, zero = _cast(bb, h, "float32"), relax.const(0.0, "float32")
    dx = bb.emit(R.where(inside, bb.emit(R.divide(h, step)), zero))
    ratio = bb.emit(R.divide(_cast(bb, x, "float32"), step))
    moved = bb.emit(R.negative(bb.emit(R.multiply(dx, ratio))))
    ds = _sum(bb, bb.emit(R.where(inside, moved, zero)), scale, attributes)
    kept = bb.emit(R.where(inside, h, zero))
    return [_cast_like(bb, dx, x), ds, *(_sum(bb, kept, z, attributes) for z in zero_point)]


def of_dequantize(y: relax.Var, call: relax.Call, gy: relax.Var, bb: Builder) -> Partials:
    """dq = gy s, ds = sum(gy (q - z')), dz = -sum(gy s)."""
    q, scale, *zero_point = call.args
    attributes = _attributes(call)
    step = bb.emit(expand_scale(scale, q, **attributes))
    gy = _cast(bb, gy, "float32")
    dq = bb.emit(R.multiply(gy, step))
    count = bb.emit(R.divide(_cast(bb, y, "float32"), step))
    ds = _sum(bb, bb.emit(R.multiply(gy, count)), scale, attributes)
    down = bb.emit(R.negative(dq))
    return [dq, ds, *(_sum(bb, down, z, attributes) for z in zero_point)]


def _of_grad(partials: relax.Var, call: relax.Call, upstream: relax.Var, bb: Builder) -> Partials:
    """Along upstream (a, b, c) of (dx, ds, dz): linear in gy; ds depends on z, dz on s."""
    gy, x = call.args[:2]
    fields = range(len(partials.ty.fields))
    tangents = [bb.emit(relax.TupleGetItem(upstream, i)) for i in fields]
    dgy = bb.emit(fake_quantize_tangent(*tangents, *call.args[1:], **_attributes(call)))
    return [_cast_like(bb, dgy, gy), no_grad(x), *_mixed(bb, call, gy, call.args[1:], tangents)]


def _of_tangent(_: relax.Var, call: relax.Call, upstream: relax.Var, bb: Builder) -> Partials:
    """Linear in the tangents, whose partials are those of `fake_quantize`."""
    count = 3 if len(call.args) == 6 else 2
    tangents, args = call.args[:count], call.args[count:]
    partials = bb.emit(fake_quantize_grad(upstream, *args, **_attributes(call)))
    found = [bb.emit(relax.TupleGetItem(partials, i)) for i in range(count)]
    mixed = _mixed(bb, call, upstream, args, tangents)
    return [*found, no_grad(args[0]), *mixed]


def _mixed(
    bb: Builder, call: relax.Call, gy: relax.Expr, args: Sequence[relax.Expr], tangents: Partials
) -> Partials:
    """For the scale and the zero point: -c and -b times the sum of gy over clipped elements."""
    if len(tangents) == 2:
        return [no_grad(arg) for arg in args[1:]]
    attributes = _attributes(call)
    clipped = bb.emit(range_mask(*args, part="clipped", **attributes))
    term = bb.emit(R.where(clipped, gy, relax.const(0.0, str(gy.ty.dtype))))
    total = bb.emit(R.negative(bb.emit(sum_groups(term, args[1], **_unrounded(attributes)))))
    return [
        _cast_like(bb, bb.emit(R.multiply(total, _cast(bb, tangent, "float32"))), arg)
        for arg, tangent in zip(args[1:], tangents[:0:-1], strict=True)
    ]


def _of_expand_scale(_: relax.Var, call: relax.Call, g: relax.Var, bb: Builder) -> Partials:
    return [_sum(bb, g, call.args[0], _attributes(call)), no_grad(call.args[1])]


def _of_sum_groups(_: relax.Var, call: relax.Call, g: relax.Var, bb: Builder) -> Partials:
    x, scale = call.args
    dx = bb.emit(expand_scale(g, x, **_unrounded(_attributes(call))))
    return [_cast_like(bb, dx, x), no_grad(scale)]


def _of_range_mask(_: relax.Var, call: relax.Call, g: relax.Var, bb: Builder) -> Partials:
    return [no_grad(arg) for arg in call.args]


def _attributes(call: relax.Call) -> dict[str, Any]:
    return format_attributes(format_of(call))


def _unrounded(attributes: dict[str, Any]) -> dict[str, Any]:
    """For what is no scale but has the shape of one."""
    return {**attributes, "scale_dtype": None}


def _sum(
    bb: Builder, term: relax.Expr, parameter: relax.Expr, attributes: dict[str, Any]
) -> relax.Expr:
    """The partial for a scale or zero point; an integer has none."""
    if not kernels.is_float(parameter.ty.dtype):
        return no_grad(parameter)
    total = bb.emit(sum_groups(term, parameter, **_unrounded(attributes)))
    return _cast_like(bb, total, parameter)


def _cast_like(bb: Builder, x: relax.Expr, like: relax.Expr) -> relax.Expr:
    return _cast(bb, x, str(like.ty.dtype))


def _cast(bb: Builder, x: relax.Expr, dtype: str) -> relax.Expr:
    return x if str(x.ty.dtype) == dtype else bb.emit(R.astype(x, dtype))


def _call(name: str, args: Sequence[relax.Expr], attributes: dict[str, Any]) -> relax.Call:
    return relax.Call(Op.get(f"relax.sits.{name}"), list(args), attributes)


def _infer_grad(call: relax.Call, bb: Builder) -> relax.TupleType:
    data = {"gy": FLOATS, "x": FLOATS}
    raise_problems(call, list(tensor_problems(call, bb, call.args, data)))
    parameters = [arg.ty for arg in call.args[2:] if kernels.is_float(arg.ty.dtype)]
    return relax.TupleType([call.args[1].ty, *parameters])


def _infer_tangent(call: relax.Call, bb: Builder) -> relax.TensorType:
    count = 3 if len(call.args) == 6 else 2
    args = list(call.args[count:])
    raise_problems(call, list(tensor_problems(call, bb, args, {"x": FLOATS})))
    for tangent, arg in zip(call.args[:count], args, strict=False):
        if not same_shape(tangent.ty, arg.ty):
            raise_problems(call, [f"tangent {show(tangent.ty)} is not of shape {show(arg.ty)}"])
    return with_dtype(args[0].ty, "float32")


def _infer_range_mask(call: relax.Call, bb: Builder) -> relax.TensorType:
    raise_problems(call, list(tensor_problems(call, bb, call.args, {"x": FLOATS})))
    return with_dtype(call.args[0].ty, "bool")


def _infer_expand_scale(call: relax.Call, _: Builder) -> relax.TensorType:
    return with_dtype(call.args[1].ty, "float32")


def _infer_sum_groups(call: relax.Call, _: Builder) -> relax.TensorType:
    return with_dtype(call.args[1].ty, "float32")


def _legalize_range_mask(bb: Builder, call: relax.Call) -> relax.Expr:
    kernel = partial(kernels.range_mask, format_of(call), str(call.attrs["part"]))
    return call_kernel(bb, call, kernel, *call.args)


def _legalize_tangent(bb: Builder, call: relax.Call) -> relax.Expr:
    count = 3 if len(call.args) == 6 else 2
    tangents, args = list(call.args[:count]), call.args[count:]
    kernel = partial(kernels.fake_quantize_tangent, format_of(call))
    return call_kernel(bb, call, kernel, tangents, *args)


def _legalize_grad(bb: Builder, call: relax.Call) -> relax.Expr:
    kernel = partial(kernels.fake_quantize_grad, format_of(call))
    return call_kernel(bb, call, kernel, *call.args, op_pattern=_OPAQUE)


_OPAQUE = 8  # FuseOps leaves the kernel alone

register_op(
    "relax.sits.fake_quantize_grad",
    _infer_grad,
    fake_quantize_grad,
    legalize=_legalize_grad,
    validate=validate,
    gradient=_of_grad,
)
register_op(
    "relax.sits.fake_quantize_tangent",
    _infer_tangent,
    fake_quantize_tangent,
    legalize=_legalize_tangent,
    validate=validate,
    gradient=_of_tangent,
)
register_op(
    "relax.sits.range_mask",
    _infer_range_mask,
    range_mask,
    legalize=_legalize_range_mask,
    validate=validate,
    gradient=_of_range_mask,
)
register_op(
    "relax.sits.expand_scale",
    _infer_expand_scale,
    expand_scale,
    legalize=legalize_with(kernels.expand_scale),
    validate=validate,
    gradient=_of_expand_scale,
)
register_op(
    "relax.sits.sum_groups",
    _infer_sum_groups,
    sum_groups,
    legalize=legalize_with(kernels.sum_groups),
    validate=validate,
    gradient=_of_sum_groups,
)
