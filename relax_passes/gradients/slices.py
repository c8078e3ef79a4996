"""Gradient of strided_slice: the slice put back among zeros."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax import BlockBuilder as Builder
from tvm.relax import Expr
from tvm.relax import op as R

from ._rules import dims, gradient, none, reshape, same

_ANALYZER = tvm.sym.Analyzer()


@gradient("strided_slice")
def _strided_slice(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """Each sliced axis in turn: between elements, before and after them, zeros."""
    x, axes, begins = call.args[:3]
    shape, ndim = dims(x), x.ty.ndim
    strides = call.args[4] if len(call.args) > 4 else [1] * len(axes)
    for axis, begin, stride in zip(axes, begins, strides, strict=True):
        axis = int(axis) % ndim
        begin = first(begin, shape[axis], int(stride), bool(call.attrs.assume_inbound))
        g = _spread(bb, g, axis, begin, int(stride), shape[axis])
    return [g, *none(*call.args[1:])]


def first(begin: tvm.ir.Expr, size: tvm.ir.Expr, stride: int, inbound: bool) -> tvm.ir.Expr:
    """The index at which a slice begins: from the end if negative, and not outside the axis."""
    begin = tirx.IntImm("int64", int(begin)) if isinstance(begin, tirx.IntImm) else begin
    if inbound:
        return begin
    low, high = (0, size) if stride > 0 else (-1, size - 1)
    if _ANALYZER.can_prove(begin < 0):
        begin = begin + size
    elif not _ANALYZER.can_prove(begin >= 0):
        begin = tirx.Select(begin < 0, begin + size, begin)
    return _ANALYZER.simplify(tirx.max(tirx.min(begin, high), low))


def _spread(
    bb: Builder, g: Expr, axis: int, begin: tvm.ir.Expr, stride: int, size: tvm.ir.Expr
) -> Expr:
    """(…, n, …) to (…, size, …), element i at begin + i · stride."""
    number = dims(g)[axis]
    if stride < 0:
        g = bb.emit(R.flip(g, axis))
        begin, stride = begin + (number - 1) * stride, -stride
        begin = tirx.Select(number == 0, tirx.IntImm("int64", 0), begin)
    if stride > 1:
        g = _dilate(bb, g, axis, stride)
    begin = _ANALYZER.simplify(begin)
    room = _ANALYZER.simplify(size - begin)
    length = dims(g)[axis]
    if not _ANALYZER.can_prove(length <= room):
        length = _ANALYZER.simplify(tirx.min(length, room))
        g = bb.emit(R.strided_slice(g, [axis], [0], [length], assume_inbound=True))
    after = _ANALYZER.simplify(room - length)
    return _surround(bb, g, axis, begin, after)


def _dilate(bb: Builder, g: Expr, axis: int, stride: int) -> Expr:
    """(…, n, …) to (…, n · stride, …): stride - 1 zeros after each element."""
    shape = dims(g)
    column = reshape(bb, g, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
    column = _surround(bb, column, axis + 1, tirx.IntImm("int64", 0), stride - 1)
    return reshape(bb, column, [*shape[:axis], shape[axis] * stride, *shape[axis + 1 :]])


def _surround(
    bb: Builder, g: Expr, axis: int, before: tvm.ir.Expr, after: tvm.ir.Expr | int
) -> Expr:
    def zeros(length: tvm.ir.Expr | int) -> list[Expr]:
        if same(length, 0):
            return []
        shape = dims(g)
        shape[axis] = length
        return [bb.emit(R.zeros(relax.ShapeExpr(shape), str(g.ty.dtype)))]

    pieces = [*zeros(before), g, *zeros(after)]
    return g if len(pieces) == 1 else bb.emit(R.concat(pieces, axis))
