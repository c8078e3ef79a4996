"""Gradients of TVM's own quantization ops: straight-through rounding, exact clipping.

With r = round(x / s) (x / s itself for float8), u = r + z and lo…hi the range of the dtype::

    quantize:    dx = h / s where lo <= u <= hi, else 0;  ds = -sum(dx x / s);  dz = sum(s dx)
    dequantize:  dq = gy s;  ds = sum(gy (q - z));  dz = -sum(gy s)
    round:       dx = g
    clip:        dx = g where min <= x <= max, else 0

An integer zero point has no gradient. The sums are in blocks (`relax.sits.sum_groups`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import tvm
from tvm import relax
from tvm.relax import op as R

from ..op._affine import FORMAT
from ..op._groups import expand_scale, sum_for
from ._rules import cast, const, dims, gradient, none, reshape

Expr: TypeAlias = relax.Expr
Builder: TypeAlias = relax.BlockBuilder
_LARGEST_HALF = 65504.0


@gradient("round")
def _round(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    return [g]


@gradient("clip")
def _clip(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    x, *bounds = call.args
    low, high = (float(bound.value) for bound in bounds)
    return [_between(bb, x, low, high, g), *none(*bounds)]


@gradient("quantize")
def _quantize(var: relax.Var, call: relax.Call, h: Expr, bb: Builder) -> list[Expr]:
    x, *parameters = call.args
    form, out_dtype = {**FORMAT, "axis": int(call.attrs.axis)}, str(call.attrs.out_dtype)
    scale, zero_point = (_one_or_vector(bb, p) for p in parameters)
    s, z = (bb.emit(expand_scale(p, x, **form)) for p in (scale, zero_point))
    ratio = _ratio(bb, x, s, parameters[0])
    rounded = bb.emit(R.round(ratio)) if "int" in out_dtype else ratio
    u = cast(bb, bb.emit(R.add(rounded, cast(bb, z, rounded.ty.dtype))), "float32")
    kept = _between(bb, u, *_range(out_dtype), cast(bb, h, "float32"))
    dx = bb.emit(R.divide(kept, s))
    along_s = bb.emit(R.negative(R.multiply(dx, cast(bb, ratio, "float32"))))
    along_s = _between(bb, u, *_range(out_dtype), along_s)
    partials = _to_parameters(bb, (along_s, kept), parameters, form)
    return [cast(bb, dx, x.ty.dtype), *partials]


@gradient("dequantize")
def _dequantize(y: relax.Var, call: relax.Call, gy: Expr, bb: Builder) -> list[Expr]:
    q, *parameters = call.args
    form = {**FORMAT, "axis": int(call.attrs.axis)}
    s, z = (bb.emit(expand_scale(_one_or_vector(bb, p), q, **form)) for p in parameters)
    steps = bb.emit(R.subtract(cast(bb, q, "float32"), z))
    gy = cast(bb, gy, "float32")
    if str(call.attrs.out_dtype) == "float16":  # where TVM clips
        value = bb.emit(R.multiply(steps, s))
        gy = _between(bb, value, -_LARGEST_HALF, _LARGEST_HALF, gy)
    dq = bb.emit(R.multiply(gy, s))
    terms = bb.emit(R.multiply(gy, steps)), bb.emit(R.negative(dq))
    return [dq, *_to_parameters(bb, terms, parameters, form)]


def _ratio(bb: Builder, x: Expr, s: Expr, scale: Expr) -> Expr:
    """x / s in the dtype in which TVM divides: float16 if both are."""
    half = str(x.ty.dtype) == str(scale.ty.dtype) == "float16"
    dtype = "float16" if half else "float32"
    return bb.emit(R.divide(cast(bb, x, dtype), cast(bb, s, dtype)))


def _range(dtype: str) -> tuple[float, float]:
    return float(tvm.tirx.min_value(dtype).value), float(tvm.tirx.max_value(dtype).value)


def _between(bb: Builder, x: Expr, low: float, high: float, g: Expr) -> Expr:
    """g where low <= x <= high, else 0."""
    zero = const(0, g)
    above = bb.emit(R.where(R.greater_equal(x, const(low, x)), g, zero))
    return bb.emit(R.where(R.less_equal(x, const(high, x)), above, zero))


def _one_or_vector(bb: Builder, parameter: Expr) -> Expr:
    """One number, which TVM also takes as (1,) or (1, 1), in rank 0; or one per channel."""
    shape = dims(parameter)
    one = all(isinstance(d, tvm.tirx.IntImm) and int(d) == 1 for d in shape)
    return reshape(bb, parameter, [] if one else shape)


def _to_parameters(
    bb: Builder, terms: tuple[Expr, ...], parameters: list[Expr], form: dict[str, Any]
) -> list[Expr]:
    """The partials of scale and zero point, in their shapes."""
    partials = []
    for term, parameter in zip(terms, parameters, strict=True):
        total = sum_for(bb, term, _one_or_vector(bb, parameter), form)
        is_float = "float" in str(parameter.ty.dtype)
        partials.append(reshape(bb, total, dims(parameter)) if is_float else none(parameter)[0])
    return partials
