"""Gradients of reductions, with symbolic lengths."""

from __future__ import annotations

from tvm import relax
from tvm.relax import BlockBuilder as Builder
from tvm.relax import Expr
from tvm.relax import op as R

from ._rules import (
    as_tvm_where_static,
    axes_of,
    cast,
    const,
    count,
    dims,
    gradient,
    reshape,
    sum_to,
)


def _restored(bb: Builder, y: Expr, call: relax.Call) -> Expr:
    """A result or its gradient with the reduced axes put back as ones, if it is no scalar."""
    if call.attrs.keepdims or y.ty.ndim == 0:
        return y
    axes = axes_of(call.attrs.axis, len(dims(call.args[0])))
    return bb.emit(R.expand_dims(y, axes)) if axes else y


def _reduced(call: relax.Call) -> list:
    """The lengths that are reduced."""
    lengths = dims(call.args[0])
    return [lengths[a] for a in axes_of(call.attrs.axis, len(lengths))]


@gradient("sum", in_tvm=as_tvm_where_static)
def _sum(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    return [R.broadcast_to(_restored(bb, g, call), call.args[0].ty.shape)]


@gradient("mean", in_tvm=as_tvm_where_static)
def _mean(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    g = bb.emit(R.divide(g, count(bb, _reduced(call), g)))
    return [R.broadcast_to(_restored(bb, g, call), call.args[0].ty.shape)]


@gradient("variance")
def _variance(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """dx = g · 2 (x - mean) / n."""
    g = R.multiply(_restored(bb, g, call), const(2, g))
    return [R.multiply(bb.emit(g), _deviation(bb, call))]


@gradient("std")
def _std(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """dx = g · (x - mean) / (n std)."""
    g = bb.emit(R.divide(g, var))
    return [R.multiply(_restored(bb, g, call), _deviation(bb, call))]


def _deviation(bb: Builder, call: relax.Call) -> Expr:
    """(x - mean) / n."""
    (x,) = call.args
    mean = bb.emit(R.mean(x, call.attrs.axis, keepdims=True))
    return bb.emit(R.divide(bb.emit(R.subtract(x, mean)), count(bb, _reduced(call), x)))


@gradient("max", "min")
def _extremum(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """Elements that tie share the gradient, as with torch.amax."""
    (x,) = call.args
    hit = bb.emit(R.equal(x, _restored(bb, var, call)))
    ties = bb.emit(R.sum(cast(bb, hit, g.ty.dtype), call.attrs.axis, keepdims=True))
    share = bb.emit(R.divide(_restored(bb, g, call), ties))
    return [R.where(hit, share, const(0, g))]  # no product: 0 · inf would be NaN


@gradient("broadcast_to")
def _broadcast_to(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    x, shape = call.args
    return [sum_to(bb, g, x), R.grad.no_grad(shape)]


@gradient("collapse_sum_to")
def _collapse_sum_to(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    x, shape = call.args
    return [R.broadcast_to(g, x.ty.shape), R.grad.no_grad(shape)]


@gradient("nn.cross_entropy_with_logits")
def _cross_entropy(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """z = -Σ x y / n, with n the length of axis 0 (1 for vectors)."""
    x, y = call.args
    if x.ty.ndim > 1:
        g = bb.emit(R.divide(g, count(bb, dims(x)[:1], g)))
    g = bb.emit(R.negative(g))
    return [R.multiply(g, y), R.multiply(g, x)]


@gradient("cumsum")
def _cumsum(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """The running sum from the end; exclusive if that of x is."""
    (x,), attrs = call.args, call.attrs
    axis = 0 if attrs.axis is None else int(attrs.axis)  # of all elements in a row if None
    total = bb.emit(R.cumsum(bb.emit(R.flip(g, axis)), axis, exclusive=attrs.exclusive))
    return [cast(bb, reshape(bb, bb.emit(R.flip(total, axis)), dims(x)), x.ty.dtype)]
