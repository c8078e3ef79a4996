"""Scales and zero points of a chain: how they broadcast, and in which shape the quantize ops take
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .._values import (
    Values,
    equal_dims,
    equal_shapes,
    is_one,
    is_tensor,
    static_shape,
)
from .events import Parameter, Refused, is_integer


@dataclass(frozen=True)
class Granularity:
    """Which elements of x share a scale, as attributes of the quantize ops.

    `aligned` is the shape in which the scale broadcasts to x, `shape` the one that the op takes.
    """

    name: str
    axis: int
    group_size: int | None
    aligned: list[Any]
    shape: list[Any]


def aligned_shape(values: Values, parameter: Parameter, rank: int) -> list[Any]:
    """The shape in which a parameter broadcasts to an x of `rank`, with that rank."""
    expr = parameter.expr
    if not is_tensor(expr):
        raise Refused("shape-unknown", f"{expr} is {getattr(expr, 'ty', None)}, of unknown shape")
    if parameter.axis is not None:  # R.quantize takes a vector along an axis, or one number
        extents = [dim for dim in expr.ty.shape if not is_one(dim)]
        shape: list[Any] = [1] * rank
        if extents:
            shape[parameter.axis] = extents[0]
        return shape
    own = parameter.shape if parameter.shape is not None else values.unstretched(expr)[1]
    own = list(own)
    while len(own) > rank and is_one(own[0]):
        own = own[1:]
    if len(own) > rank:
        raise Refused("granularity", f"the scale of shape {own} broadcasts x to a higher rank")
    return [1] * (rank - len(own)) + own


def agree(values: Values, a: Parameter, b: Parameter, rank: int) -> bool:
    """Whether two parameters hold the same values for every element of x."""
    left, right = (values.constant(p.expr) for p in (a, b))
    if left is not None and right is not None and left.size == right.size == 1:
        return bool(left.item() == right.item())
    if not equal_shapes(aligned_shape(values, a, rank), aligned_shape(values, b, rank)):
        return False
    if left is not None and right is not None:
        return np.array_equal(left.ravel(), right.ravel())
    return values.same(*(_before_widening(values, p.expr) for p in (a, b)))


def _before_widening(values: Values, expr: relax.Expr) -> relax.Expr:
    """What `expr` is stretched from, before casts of integers."""
    expr = values.unstretched(expr)[0]
    name, call = values.call(expr)
    while name == "astype" and is_integer(str(call.args[0].ty.dtype)):
        expr = values.unstretched(call.args[0])[0]
        name, call = values.call(expr)
    return expr


def read_granularity(
    values: Values, x: relax.Expr, scale: Parameter, zero: Parameter | None
) -> Granularity:
    """How scale and zero point lie over x."""
    shape = list(x.ty.shape)
    aligned = aligned_shape(values, scale, len(shape))
    if zero is not None:
        other = aligned_shape(values, zero, len(shape))
        aligned = [b if is_one(a) else a for a, b in zip(aligned, other, strict=True)]
    axes = [i for i, dim in enumerate(aligned) if not is_one(dim)]
    if not all(equal_dims(aligned[i], shape[i]) for i in axes):
        raise Refused(
            "granularity", f"scale {aligned} and zero point do not broadcast to x {shape}"
        )
    if not axes:
        return Granularity("per tensor", -1, None, aligned, [])
    if len(axes) == 1:
        axis = axes[0]
        return Granularity(f"per channel, axis {axis}", axis, None, aligned, [aligned[axis]])
    shared = [i for i in range(len(shape)) if i not in axes and not is_one(shape[i])]
    if len(shared) > 1:
        raise Refused(
            "granularity", f"the scale {aligned} is shared over axes {shared} of x {shape}"
        )
    axis = shared[0] if shared else len(shape) - 1
    size = -1 if shared else 1
    return Granularity(f"per group, axis {axis}", axis, size, aligned, aligned)


def repeated_scale(values: Values, expr: relax.Expr) -> tuple[relax.Expr, int, int, Any] | None:
    """(scale, group size, axis from the end, groups) where `expr` repeats scales for groups."""
    name, call = values.call(expr)
    if name == "repeat" and call.attrs.axis is not None:
        axis = int(call.attrs.axis) % call.ty.ndim
        scale = call.args[0]
        return scale, int(call.attrs.repeats), axis - call.ty.ndim, scale.ty.shape[axis]
    if name != "reshape":
        return None
    inner, stretch = values.call(call.args[0])
    if inner != "broadcast_to" or stretch is None:
        return None
    narrow, wide = static_shape(stretch.args[0]), static_shape(stretch)
    if not narrow or not wide or len(narrow) != len(wide) or narrow[-1] != 1:
        return None
    if narrow[:-1] != wide[:-1] or static_shape(call) != [*wide[:-2], wide[-2] * wide[-1]]:
        return None
    scale, shape = values.unstretched(stretch.args[0])
    return scale if equal_shapes(shape, narrow) else stretch.args[0], wide[-1], -1, narrow[-2]


def in_shape(
    values: Values, parameter: Parameter, aligned: Sequence[Any], shape: Sequence[Any]
) -> relax.Expr:
    """The parameter, broadcast to `aligned` and in the shape `shape`, as an expression."""
    own = aligned_shape(values, parameter, len(aligned))
    array = values.constant(parameter.expr)
    if array is not None and all(isinstance(d, int | tvm.tirx.IntImm) for d in aligned):
        dims = [int(d) for d in aligned]
        if array.size != 1 or not dims:
            array = array.reshape([int(d) for d in own])
        wide = np.broadcast_to(array.reshape(()) if array.size == 1 else array, dims)
        return relax.const(np.array(wide.reshape([int(d) for d in shape])))
    expr = parameter.expr
    if parameter.axis is None and parameter.shape is None:
        expr = values.unstretched(expr)[0]
    if not equal_shapes(own, aligned):
        expr = relax.op.broadcast_to(_reshape(expr, own), list(aligned))
        return relax.op.reshape(expr, list(shape)) if len(shape) != len(aligned) else expr
    return _reshape(expr, shape)


def _reshape(expr: relax.Expr, shape: Sequence[Any]) -> relax.Expr:
    if is_tensor(expr) and equal_shapes(list(expr.ty.shape), shape):
        return expr
    return relax.op.reshape(expr, list(shape))
