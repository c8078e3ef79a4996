"""Gradients of ops that move elements without reading them, with symbolic lengths."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax import BlockBuilder as Builder
from tvm.relax import Expr
from tvm.relax import op as R

from ._rules import as_tvm, as_tvm_where_static, cast, dims, gradient, none, reshape, wide_sum


@gradient("reshape", "flatten", "squeeze", "expand_dims", in_tvm=as_tvm_where_static)
def _reshape(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    x = call.args[0]
    return [reshape(bb, g, dims(x)), *none(*call.args[1:])]


@gradient("grad.start_checkpoint", "grad.end_checkpoint", in_tvm=as_tvm_where_static)
def _identity(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    return [g]


@gradient("concat", in_tvm=as_tvm_where_static)
def _concat(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    tensors = call.args[0].ty.fields
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    axis, begin, parts = axis % tensors[0].ndim, tvm.tirx.IntImm("int64", 0), []
    for tensor in tensors:
        end = tvm.sym.Analyzer().simplify(begin + tensor.shape[axis])
        parts.append(R.strided_slice(g, [axis], [begin], [end], assume_inbound=True))
        begin = end
    return [relax.Tuple(parts)]


@gradient("stack")
def _stack(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % var.ty.ndim
    number = len(call.args[0].ty.fields)
    slices = [
        bb.emit(R.strided_slice(g, [axis], [i], [i + 1], assume_inbound=True))
        for i in range(number)
    ]
    return [relax.Tuple([bb.emit(R.squeeze(part, [axis])) for part in slices])]


@gradient("flip")
def _flip(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    return [R.flip(g, int(call.attrs.axis))]


@gradient("tril", "triu", in_tvm=as_tvm)
def _triangle(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    return [relax.Call(call.op, [g, call.args[1]], call.attrs), *none(call.args[1])]


@gradient("repeat")
def _repeat(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """Copies of an element lie side by side."""
    (x,), copies = call.args, int(call.attrs.repeats)
    shape = dims(x)
    after = len(shape) if call.attrs.axis is None else int(call.attrs.axis) % len(shape) + 1
    split = reshape(bb, g, [*shape[:after], copies, *shape[after:]])
    return [wide_sum(bb, split, [after])]


@gradient("tile")
def _tile(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """Copies of the tensor follow each other along each axis."""
    (x,), copies = call.args, [int(r) for r in call.attrs.repeats]
    ndim = max(len(copies), x.ty.ndim)
    lengths = [1] * (ndim - x.ty.ndim) + dims(x)
    copies = [1] * (ndim - len(copies)) + copies
    pairs = [d for pair in zip(copies, lengths, strict=True) for d in pair]
    total = wide_sum(bb, reshape(bb, g, pairs), range(0, 2 * ndim, 2))
    return [reshape(bb, total, dims(x))]


@gradient("permute_dims", in_tvm=as_tvm_where_static)
def _permute_dims(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    ndim, axes = var.ty.ndim, call.attrs.axes
    forward = list(range(ndim))[::-1] if not axes else [int(a) % ndim for a in axes]
    return [R.permute_dims(g, [forward.index(i) for i in range(ndim)])]


@gradient("full", "full_like", in_tvm=as_tvm)
def _full(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """The value is in every element."""
    like, value = call.args
    total = wide_sum(bb, g, range(var.ty.ndim))
    return [*none(like), cast(bb, reshape(bb, total, dims(value)), value.ty.dtype)]
