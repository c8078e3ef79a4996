"""Scales and zero points that span each group of a tensor, in TE: `rounding.scale_and_zero`."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

from .affine import AffineFormat

Expr = Any


def absmax_scale(form: AffineFormat, scale_dtype: str, x: te.Tensor) -> te.Tensor | list[te.Tensor]:
    """The scale of signed codes, or [scale, zero_point] of unsigned ones, for groups of x.

    The scale is float32 with values of `scale_dtype`, the zero point uint8.
    """
    shape, levels = form.param_shape(x.shape, len(x.shape)), form.hi - form.lo
    if form.signed:
        reach = _extreme(form, x, te.max, lambda value: tirx.abs(value), "reach")
        return _compute(shape, lambda at: _scale(reach(*at), levels // 2, scale_dtype), "scale")
    low = _extreme(form, x, te.min, lambda value: tirx.min(value, _float32(0)), "low")
    high = _extreme(form, x, te.max, lambda value: tirx.max(value, _float32(0)), "high")
    scale = _compute(shape, lambda at: _scale(high(*at) - low(*at), levels, scale_dtype), "scale")

    def zero_point(at: tuple[tirx.Var, ...]) -> Expr:
        steps = tirx.nearbyint(-low(*at) / scale(*at))
        return tirx.min(steps, _float32(levels)).astype("uint8")

    return [scale, _compute(shape, zero_point, "zero_point")]


def _scale(reach: Expr, steps: int, dtype: str) -> Expr:
    """reach / steps rounded to `dtype`, 1 where all elements are 0, never rounded to 0."""
    exact = tirx.Select(reach == _float32(0), _float32(1), reach / _float32(steps))
    smallest = float(np.finfo(dtype).smallest_subnormal)
    return tirx.max(exact.astype(dtype).astype("float32"), _float32(smallest))


def _extreme(form: AffineFormat, x: te.Tensor, reduce: Any, value: Any, name: str) -> te.Tensor:
    """The largest or smallest `value` of the elements of a group; 0 beyond the tensor's edge."""
    axis, extent = form.axis % len(x.shape), x.shape[form.axis]
    size = extent if form.group_size == -1 else form.group_size
    member = te.reduce_axis((0, size), "member")

    def extreme(at: tuple[tirx.Var, ...]) -> Expr:
        where = list(at)
        where[axis] = member.var if form.group_size == -1 else at[axis] * size + member.var
        element = value(x(*where).astype("float32"))
        inside = tirx.if_then_else(where[axis] < extent, element, _float32(0))
        return reduce(inside, axis=member)

    return _compute(form.param_shape(x.shape, len(x.shape)), extreme, name)


def _compute(shape: list[Expr], body: Any, name: str) -> te.Tensor:
    return te.compute(shape, lambda *at: body(at), name=name)


def _float32(value: float) -> Expr:
    return tirx.const(value, "float32")
