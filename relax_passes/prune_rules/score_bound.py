"""How large scores can get where queries and keys are normalized: a fact, no rewrite.

RMSNorm gives ‖q‖ ≤ √D · max|γ|, and a rotation keeps the norm, so by Cauchy and Schwarz
|scale · q·k| ≤ |scale| · D · max|γ_q| · max|γ_k|.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx

from .._tensors import shape_of
from .attention import ATTENTION, AttentionCall
from .rotary import unrotated
from .rule import Outcome, Rule, Scope, names
from .views import Chain

_MAX_STEPS = 8


@dataclass(frozen=True)
class _Norm:
    """‖x‖ ≤ factor · √D · max|weight|, for each vector along the last axis."""

    factor: float
    weight: relax.Expr


def _look(call: relax.Call, scope: Scope) -> Outcome | None:
    found = AttentionCall.of(call, scope)
    if found is None or not isinstance(call.args[0].ty.shape[3], tirx.IntImm):
        return None
    q, k = _norm(found.q, scope), _norm(found.k, scope)
    if q is None or k is None:
        return None
    width = int(call.args[0].ty.shape[3])
    number = abs(found.attrs["scale"]) * width * q.factor * k.factor
    words = []
    for largest in (_largest(q.weight, scope), _largest(k.weight, scope)):
        if isinstance(largest, float):
            number *= largest
        else:
            words.append(largest)
    bound = " · ".join([f"{number:.4g}", *words])
    return Outcome(f"fact: |score| ≤ {bound}, from the RMS norms of q and k over {width} elements")


def _norm(x: relax.Expr, scope: Scope) -> _Norm | None:
    """Down through views, casts, factors and rotations to a norm along the last axis."""
    factor = 1.0
    for _ in range(_MAX_STEPS):
        x = rows_below(x, scope)
        weight = _rms_weight(x, scope)
        if weight is not None:
            return _Norm(factor, weight)
        name, call = scope.call(x)
        turned = unrotated(x, scope)
        number = scope.number(call.args[1]) if name in ("multiply", "divide") else None
        if turned is not None:
            x = turned
        elif number:
            factor *= abs(number if name == "multiply" else 1.0 / number)
            x = call.args[0]
        elif name == "astype":
            x = call.args[0]
        else:
            return None
    return None


def rows_below(x: relax.Expr, scope: Scope) -> relax.Expr:
    """The deepest tensor of which `x` shows the vectors along the last axis, each as it is."""
    if shape_of(x) is None or not scope.call(x)[0]:
        return x
    chain = Chain(x, scope)
    for source, at in reversed(chain.below):
        dims = shape_of(source)
        is_whole = dims and chain.domain.is_equal(dims[-1], chain.shape[-1])
        if is_whole and chain.domain.is_equal(at[-1], chain.axes[-1]):
            return source
    return x


def _rms_weight(x: relax.Expr, scope: Scope) -> relax.Expr | None:
    """γ of γ · h / √(mean(h²) + ε), spelled as one op or as several."""
    name, call = scope.call(x)
    if name == "nn.rms_norm":
        axes = [int(axis) % x.ty.ndim for axis in call.attrs.axes]
        return call.args[1] if axes == [x.ty.ndim - 1] else None
    for weight, normed in ((0, 1), (1, 0)) if name == "multiply" else ():
        if _is_normed(_uncast(call.args[normed], scope), scope):
            return call.args[weight] if call.args[weight].ty.ndim == 1 else None
    return None


def _is_normed(x: relax.Expr, scope: Scope) -> bool:
    """h · rsqrt(mean(h²) + ε)."""
    name, call = scope.call(x)
    for h, root in ((0, 1), (1, 0)) if name == "multiply" else ():
        name, rsqrt = scope.call(call.args[root])
        if name != "rsqrt":
            continue
        name, add = scope.call(rsqrt.args[0])
        if name == "add" and (scope.number(add.args[1]) or -1.0) > 0.0:
            return _is_mean_square(add.args[0], call.args[h], scope)
    return False


def _is_mean_square(x: relax.Expr, h: relax.Expr, scope: Scope) -> bool:
    name, mean = scope.call(x)
    if name != "mean" or not mean.attrs.keepdims:
        return False
    if [int(axis) % h.ty.ndim for axis in mean.attrs.axis or ()] != [h.ty.ndim - 1]:
        return False
    name, square = scope.call(mean.args[0])
    if name == "square":
        return square.args[0].same_as(h)
    if name == "power":
        return square.args[0].same_as(h) and scope.number(square.args[1]) == 2.0
    return name == "multiply" and all(arg.same_as(h) for arg in square.args)


def _uncast(x: relax.Expr, scope: Scope) -> relax.Expr:
    name, call = scope.call(x)
    return call.args[0] if name == "astype" else x


def _largest(weight: relax.Expr, scope: Scope) -> float | str:
    """max|γ|, a number where γ is a constant."""
    values = scope.constant(weight)
    if values is not None:
        return float(np.max(np.abs(values.astype(float)), initial=0.0))
    name, call = scope.call(weight)
    number = scope.number(call.args[1]) if name == "add" else None
    if number is not None:
        return f"max|{names([_uncast(call.args[0], scope)])} + {number:g}|"
    return f"max|{names([_uncast(weight, scope)])}|"


SCORE_BOUND_RULE = Rule("score-bound", ATTENTION, _look)
