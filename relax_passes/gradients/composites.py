"""Gradients of ops that are defined by simpler ones: those are emitted again and differentiated.

The forward values are recomputed in the backward pass, so nothing between is kept in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax
from tvm.relax import BlockBuilder as Builder
from tvm.relax import Expr
from tvm.relax import op as R

from ..op._attention_plain import lower_plain
from ._rules import Rule, axes_of, cast, const, dims, gradient, none, reshape
from .reverse import vector_jacobian

_WIDE = ("float32", "float64")


def _composite(*names: str, in_tvm: Callable | None = None) -> Callable:
    """Register the gradient of ops that ``plain(bb, call)`` emits in simpler ones."""

    def register(plain: Callable[[Builder, relax.Call], Expr]) -> Callable:
        @gradient(*names, in_tvm=in_tvm)
        def rule(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
            return vector_jacobian(bb, plain(bb, call), g, call.args)

        return plain

    return register


_composite("sits.attention")(lower_plain)


def _widened(bb: Builder, call: relax.Call) -> list[Expr]:
    """The arguments, half precision as float32."""
    return [x if str(x.ty.dtype) in _WIDE else cast(bb, x, "float32") for x in call.args]


@_composite("nn.gelu")
def gelu(bb: Builder, call: relax.Call) -> Expr:
    """x Φ(x) = x/2 (1 + erf(x/√2))."""
    (x,) = _widened(bb, call)
    inner = bb.emit(R.erf(bb.emit(R.multiply(x, const(math.sqrt(0.5), x)))))
    return _half_of(bb, x, inner, call)


@_composite("nn.gelu_tanh")
def gelu_tanh(bb: Builder, call: relax.Call) -> Expr:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    (x,) = _widened(bb, call)
    cubic = bb.emit(R.multiply(bb.emit(R.multiply(x, x)), const(0.044715, x)))
    cubic = bb.emit(R.multiply(bb.emit(R.add(cubic, const(1, x))), x))
    inner = bb.emit(R.tanh(bb.emit(R.multiply(cubic, const(math.sqrt(2 / math.pi), x)))))
    return _half_of(bb, x, inner, call)


def _half_of(bb: Builder, x: Expr, inner: Expr, call: relax.Call) -> Expr:
    gate = bb.emit(R.multiply(bb.emit(R.add(inner, const(1, x))), const(0.5, x)))
    return cast(bb, bb.emit(R.multiply(x, gate)), call.args[0].ty.dtype)


@_composite("nn.layer_norm")
def layer_norm(bb: Builder, call: relax.Call) -> Expr:
    """(x - mean) / √(variance + ε) · γ + β over `axes`."""
    x, gamma, beta = _widened(bb, call)
    axes = axes_of(call.attrs.axes, x.ty.ndim)
    deviation = bb.emit(R.subtract(x, bb.emit(R.mean(x, axes, keepdims=True))))
    variance = bb.emit(R.mean(bb.emit(R.multiply(deviation, deviation)), axes, keepdims=True))
    out = _divided_by_root(bb, deviation, variance, float(call.attrs.epsilon))
    if call.attrs.scale:
        out = bb.emit(R.multiply(out, _aligned(bb, gamma, axes, x)))
    if call.attrs.center:
        out = bb.emit(R.add(out, _aligned(bb, beta, axes, x)))
    return cast(bb, out, call.args[0].ty.dtype)


@_composite("nn.rms_norm")
def rms_norm(bb: Builder, call: relax.Call) -> Expr:
    """x / √(mean(x²) + ε) · w over `axes`."""
    x, weight = _widened(bb, call)
    axes = axes_of(call.attrs.axes, x.ty.ndim)
    square = bb.emit(R.mean(bb.emit(R.multiply(x, x)), axes, keepdims=True))
    out = _divided_by_root(bb, x, square, float(call.attrs.epsilon))
    out = bb.emit(R.multiply(out, _aligned(bb, weight, axes, x)))
    return cast(bb, out, call.args[0].ty.dtype)


def _divided_by_root(bb: Builder, x: Expr, square: Expr, epsilon: float) -> Expr:
    root = bb.emit(R.rsqrt(bb.emit(R.add(square, const(epsilon, x)))))
    return bb.emit(R.multiply(x, root))


def _aligned(bb: Builder, weight: Expr, axes: list[int], x: Expr) -> Expr:
    """A weight over `axes` with ones for the axes of x behind the first of them."""
    missing = [a for a in range(axes[0], x.ty.ndim) if a not in axes]
    return bb.emit(R.expand_dims(weight, [a - axes[0] for a in missing])) if missing else weight


def _without_weights(_: Rule, ours: Rule) -> Rule:
    """TVM's rule gives no gradient to weights of classes."""

    def rule(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
        return [*ours(var, call, g, bb)[:1], *none(*call.args[1:])]

    return rule


@_composite("nn.nll_loss", in_tvm=_without_weights)
def nll_loss(bb: Builder, call: relax.Call) -> Expr:
    """-Σ w[t] x[t] (mean: over Σ w[t]). TVM's gradient reads w at an ignored target below 0."""
    (x, targets, *weights), dtype = call.args, call.args[0].ty.dtype
    axis = min(1, x.ty.ndim - 1)
    ignored = relax.const(int(call.attrs.ignore_index), str(targets.ty.dtype))
    column, counts = (
        bb.emit(R.expand_dims(t, axis)) for t in (targets, bb.emit(R.not_equal(targets, ignored)))
    )
    classes = _along(bb, bb.emit(R.arange(0, dims(x)[axis], 1, str(targets.ty.dtype))), axis, x)
    hit = bb.emit(R.logical_and(bb.emit(R.equal(column, classes)), counts))
    hit = reshape(bb, hit, dims(x))  # their lengths may be known to be equal at run time only
    wide = "float64" if dtype == "float64" else "float32"
    weight = cast(bb, weights[0] if weights else relax.const(1, wide), wide)
    weight = _along(bb, weight, axis, x) if weights else weight
    x, weight = (
        bb.emit(R.where(hit, part, const(0, part))) for part in (cast(bb, x, wide), weight)
    )
    axes = [axis] if call.attrs.reduction == "none" else None
    total = bb.emit(R.negative(bb.emit(R.sum(bb.emit(R.multiply(x, weight)), axes))))
    if call.attrs.reduction == "mean":
        total = bb.emit(R.divide(total, bb.emit(R.sum(weight))))
    return cast(bb, total, dtype)


def _along(bb: Builder, vector: Expr, axis: int, x: Expr) -> Expr:
    """A vector over the classes with ones for the axes of x behind them."""
    return reshape(bb, vector, [*dims(vector), *[1] * (x.ty.ndim - 1 - axis)])
