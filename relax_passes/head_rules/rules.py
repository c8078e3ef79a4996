"""How a selection of heads goes through each op, to its operands."""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import relax, tirx
from tvm.ir import Op

from .reshape import through_reshape
from .selection import (
    LINEAR,
    OTHER,
    VIEW,
    NotPerHead,
    Selection,
    Walk,
    op_name,
)


def _permute(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    axes = call.attrs["axes"]
    ndim = call.ty.ndim
    order = list(range(ndim))[::-1] if axes is None else [int(a) % ndim for a in axes]
    walk.writer.passes(VIEW)
    inner = walk.select(call.args[0], replace(selection, axis=order[selection.axis]))
    return relax.Call(call.op, [inner], call.attrs)


def _reshape(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    walk.writer.passes(VIEW)
    before, after = list(call.args[0].ty.shape), list(call.ty.shape)
    moved = through_reshape(before, after, selection)
    after[selection.axis] = len(selection.index)
    inner = walk.select(call.args[0], moved)
    return relax.Call(call.op, [inner, relax.ShapeExpr(after)])


def _insert_axes(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    ndim = call.ty.ndim
    added = {int(a) % ndim for a in call.attrs["axis"]}
    kept = [a for a in range(ndim) if a not in added]
    if selection.axis in added:
        raise NotPerHead(f"{op_name(call)} makes the axis of the heads")
    walk.writer.passes(VIEW)
    moved = replace(selection, axis=kept.index(selection.axis))
    return relax.Call(call.op, [walk.select(call.args[0], moved)], call.attrs)


def _slice(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    axes, begin, end = (_integers(arg) for arg in call.args[1:4])
    strides = _integers(call.args[4]) if len(call.args) > 4 else [1] * len(axes)
    ndim = call.ty.ndim
    rows = [(a % ndim, b, e, s) for a, b, e, s in zip(axes, begin, end, strides, strict=True)]
    others = [row for row in rows if row[0] != selection.axis]
    walk.writer.passes(LINEAR if others else VIEW)
    for _, first, _, stride in (row for row in rows if row[0] == selection.axis):
        extent = int(call.args[0].ty.shape[selection.axis])
        if stride < 1:
            raise NotPerHead(f"{op_name(call)} runs backwards over the heads")
        first = max(first + extent, 0) if first < 0 else first
        selection = replace(selection, index=selection.index * stride + first)
    inner = walk.select(call.args[0], selection)
    if not others:
        return inner
    columns = list(zip(*others, strict=True))
    return relax.op.strided_slice(
        inner, *(list(c) for c in columns), assume_inbound=bool(call.attrs["assume_inbound"])
    )


def _concat(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    if int(call.attrs["axis"] or 0) % call.ty.ndim == selection.axis:
        raise NotPerHead(f"{op_name(call)} joins heads of several tensors")
    fields = call.args[0]
    fields = walk.bound.get(fields, fields)
    if not isinstance(fields, relax.Tuple):
        raise NotPerHead(f"{op_name(call)} of a tuple that is made elsewhere")
    walk.writer.passes(LINEAR)
    parts = [walk.select(field, selection) for field in fields.fields]
    return relax.Call(call.op, [relax.Tuple(parts)], call.attrs)


def _reduce(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    ndim, axes = call.args[0].ty.ndim, call.attrs["axis"]
    reduced = {int(a) % ndim for a in axes} if axes is not None else set(range(ndim))
    if not call.attrs["keepdims"]:
        kept = [a for a in range(ndim) if a not in reduced]
        selection = replace(selection, axis=kept[selection.axis])
    if selection.axis in reduced:
        raise NotPerHead(f"{op_name(call)} runs over all heads")
    walk.writer.passes(OTHER)
    return relax.Call(call.op, [walk.select(call.args[0], selection)], call.attrs)


def _normalize(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    axes = {int(a) % call.ty.ndim for a in call.attrs["axes"]}
    if selection.axis in axes:
        raise NotPerHead(f"{op_name(call)} normalizes over all heads")
    walk.writer.passes(OTHER)
    rest = [walk.writer.keep(arg) for arg in call.args[1:]]
    return relax.Call(call.op, [walk.select(call.args[0], selection), *rest], call.attrs)


def _matmul(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    x, weight = call.args
    if selection.axis != call.ty.ndim - 1 or weight.ty.ndim < 2:
        raise NotPerHead("R.matmul makes a head from all of its input")
    walk.writer.passes(VIEW)
    rows = replace(selection, axis=weight.ty.ndim - 1)
    return relax.Call(call.op, [walk.writer.keep(x), walk.select(weight, rows)], call.attrs)


def _elementwise(walk: Walk, call: relax.Call, selection: Selection) -> relax.Expr:
    places = [_place(walk, call, arg, selection) for arg in call.args]
    inside = [place is not None for place in places]
    if not any(inside):
        raise NotPerHead(f"{op_name(call)} repeats one value for all heads")
    walk.writer.passes(_elementwise_kind(call, inside))
    args = [
        walk.writer.keep(arg) if place is None else walk.select(arg, place)
        for arg, place in zip(call.args, places, strict=True)
    ]
    return relax.Call(call.op, args, call.attrs)


def _place(walk: Walk, call: relax.Call, arg: relax.Expr, selection: Selection) -> Selection | None:
    """The selection in an operand; None where it is broadcast over the axis."""
    axis = selection.axis - (call.ty.ndim - arg.ty.ndim)
    if axis < 0:
        return None
    wide, here = call.ty.shape[selection.axis], arg.ty.shape[axis]
    if not (isinstance(wide, tirx.IntImm) and isinstance(here, tirx.IntImm)):
        raise NotPerHead(f"{op_name(call)} of {arg.ty}, whose axis {axis} is symbolic")
    if int(wide) == 1 and not walk.is_projected(arg):
        return None
    return replace(selection, axis=axis) if int(here) == int(wide) else None


def _elementwise_kind(call: relax.Call, inside: list[bool]) -> int:
    name = op_name(call)
    if name == "R.negative":
        return LINEAR
    if name == "R.astype":
        bits = [tvm.runtime.DataType(str(x.ty.dtype)).bits for x in (call.args[0], call)]
        return VIEW if bits[1] >= bits[0] else LINEAR
    if name == "R.add" and all(inside):
        return VIEW
    if name == "R.subtract" and all(inside):
        return LINEAR
    if (name == "R.multiply" and not all(inside)) or (name == "R.divide" and not inside[1]):
        return LINEAR
    return OTHER


def _integers(values: relax.Expr) -> list[int]:
    try:
        return [int(v) for v in values.fields]
    except (AttributeError, TypeError) as error:
        raise NotPerHead("R.strided_slice has symbolic bounds") from error


_ELEMENTWISE = (
    "add subtract multiply divide negative astype power maximum minimum where abs rsqrt sqrt "
    "square exp log tanh sigmoid erf clip cos sin nn.silu nn.gelu nn.relu"
)
RULES = {
    Op.get(f"relax.{name}"): rule
    for names, rule in (
        (_ELEMENTWISE, _elementwise),
        ("permute_dims", _permute),
        ("reshape", _reshape),
        ("expand_dims", _insert_axes),
        ("strided_slice", _slice),
        ("concat", _concat),
        ("mean sum max min variance", _reduce),
        ("nn.rms_norm nn.layer_norm", _normalize),
        ("matmul", _matmul),
    )
    for name in names.split()
}
