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
from typing import Any

from tvm import relax
from tvm.relax import op as R
from tvm.relax.op.grad import no_grad

from tir_schedules.quantization import fake_quantize as kernels

from ._affine import (
    FLOATS,
    attributes_of,
    call_kernel,
    call_of,
    call_sums,
    format_of,
    raise_problems,
    validate,
    with_dtype,
)
from ._affine_types import same_shape, show, tensor_problems
from ._groups import (
    Builder,
    Partials,
    cast,
    cast_like,
    expand_scale,
    range_mask,
    sum_for,
    sum_groups,
    unrounded,
)
from ._register import register_op


def fake_quantize_grad(*args: relax.Expr, **attributes: Any) -> relax.Call:
    """R.sits.fake_quantize_grad(gy, x, scale[, zero_point]) -> Tuple(dx, ds[, dz]).

    dz is there for a float zero point.
    """
    return call_of("fake_quantize_grad", args, attributes)


def fake_quantize_tangent(*args: relax.Expr, **attributes: Any) -> relax.Call:
    """R.sits.fake_quantize_tangent(tx, ts, [tz,] x, scale[, zero_point]) -> dy.

    The change of y along the tangents tx, ts and, for a float zero point, tz.
    """
    return call_of("fake_quantize_tangent", args, attributes)


def of_fake_quantize(_: relax.Var, call: relax.Call, gy: relax.Var, bb: Builder) -> Partials:
    """The partials of `fake_quantize`: one kernel."""
    partials = bb.emit(fake_quantize_grad(gy, *call.args, **attributes_of(call)))
    count = len(partials.ty.fields)
    found = [bb.emit(relax.TupleGetItem(partials, i)) for i in range(count)]
    return [*found, *map(no_grad, call.args[count:])]


def of_quantize(_: relax.Var, call: relax.Call, h: relax.Var, bb: Builder) -> Partials:
    """dx = h M / s, ds = -sum(h M x / s²), dz = sum(h M)."""
    x, scale, *zero_point = call.args
    form = attributes_of(call)
    inside = bb.emit(range_mask(*call.args, **form))
    step = bb.emit(expand_scale(scale, x, **form))
    h, zero = cast(bb, h, "float32"), relax.const(0.0, "float32")
    dx = bb.emit(R.where(inside, bb.emit(R.divide(h, step)), zero))
    ratio = bb.emit(R.divide(cast(bb, x, "float32"), step))
    moved = bb.emit(R.negative(bb.emit(R.multiply(dx, ratio))))
    ds = sum_for(bb, bb.emit(R.where(inside, moved, zero)), scale, form)
    kept = bb.emit(R.where(inside, h, zero))
    return [cast_like(bb, dx, x), ds, *(sum_for(bb, kept, z, form) for z in zero_point)]


def of_dequantize(_: relax.Var, call: relax.Call, gy: relax.Var, bb: Builder) -> Partials:
    """dq = gy s, ds = sum(gy (q - z')), dz = -sum(gy s).

    q - z' is what q stands for at scale 1; y / s is rounded where y is in half precision.
    """
    q, scale, *zero_point = call.args
    form = attributes_of(call)
    step = bb.emit(expand_scale(scale, q, **form))
    gy = cast(bb, gy, "float32")
    dq = bb.emit(R.multiply(gy, step))
    count = bb.emit(_steps(call, bb))
    ds = sum_for(bb, bb.emit(R.multiply(gy, count)), scale, form)
    down = bb.emit(R.negative(dq))
    return [dq, ds, *(sum_for(bb, down, z, form) for z in zero_point)]


def _steps(call: relax.Call, bb: Builder) -> relax.Call:
    """q - z', float32."""
    q, scale, *zero_point = call.args
    one = bb.emit(R.ones(scale.ty.shape, "float32"))
    form = {**unrounded(attributes_of(call)), "out_dtype": "float32"}
    return call_of("dequantize", [q, one, *zero_point], form)


def _of_grad(partials: relax.Var, call: relax.Call, upstream: relax.Var, bb: Builder) -> Partials:
    """Along upstream (a, b, c) of (dx, ds, dz): linear in gy; ds depends on z, dz on s."""
    gy, x = call.args[:2]
    fields = range(len(partials.ty.fields))
    tangents = [bb.emit(relax.TupleGetItem(upstream, i)) for i in fields]
    dgy = bb.emit(fake_quantize_tangent(*tangents, *call.args[1:], **attributes_of(call)))
    return [cast_like(bb, dgy, gy), no_grad(x), *_mixed(bb, call, gy, call.args[1:], tangents)]


def _of_tangent(_: relax.Var, call: relax.Call, upstream: relax.Var, bb: Builder) -> Partials:
    """Linear in the tangents, whose partials are those of `fake_quantize`."""
    count = 3 if len(call.args) == 6 else 2
    tangents, args = call.args[:count], call.args[count:]
    partials = bb.emit(fake_quantize_grad(upstream, *args, **attributes_of(call)))
    found = [bb.emit(relax.TupleGetItem(partials, i)) for i in range(count)]
    mixed = _mixed(bb, call, upstream, args, tangents)
    return [*found, no_grad(args[0]), *mixed]


def _mixed(
    bb: Builder, call: relax.Call, gy: relax.Expr, args: Sequence[relax.Expr], tangents: Partials
) -> Partials:
    """For the scale and the zero point: -c and -b times the sum of gy over clipped elements."""
    if len(tangents) == 2:
        return [no_grad(arg) for arg in args[1:]]
    form = attributes_of(call)
    clipped = bb.emit(range_mask(*args, part="clipped", **form))
    term = bb.emit(R.where(clipped, gy, relax.const(0.0, str(gy.ty.dtype))))
    total = bb.emit(R.negative(bb.emit(sum_groups(term, args[1], **unrounded(form)))))
    return [
        cast_like(bb, bb.emit(R.multiply(total, cast(bb, tangent, "float32"))), arg)
        for arg, tangent in zip(args[1:], tangents[:0:-1], strict=True)
    ]


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


def _legalize_tangent(bb: Builder, call: relax.Call) -> relax.Expr:
    count = 3 if len(call.args) == 6 else 2
    tangents, args = list(call.args[:count]), call.args[count:]
    kernel = partial(kernels.fake_quantize_tangent, format_of(call))
    return call_kernel(bb, call, kernel, tangents, *args)


def _legalize_grad(bb: Builder, call: relax.Call) -> relax.Expr:
    attributes = {kernels.FORMAT_ATTR: attributes_of(call)}
    return call_sums(bb, call, kernels.fake_quantize_grad, **attributes)


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
