"""A row maximum that is subtracted before a softmax, which subtracts it again."""

from __future__ import annotations

from tvm import relax
from tvm_ffi import structural_equal

from .._tensors import resolve, shape_of
from ..index_analysis.index_domain import Index, is_integer
from .rule import Outcome, Rule, Scope, names
from .views import Chain

_OPS = frozenset({"relax.nn.softmax", "relax.nn.log_softmax"})


def _look(call: relax.Call, scope: Scope) -> Outcome | None:
    x, axis = call.args[0], int(call.attrs.axis) % call.args[0].ty.ndim
    shifted, is_cast = _below_cast(x, scope)
    name, subtract = scope.call(shifted)
    if name != "subtract" or shape_of(x) is None:
        return None
    scores, shift = subtract.args
    shape = shape_of(shift)
    if shape is None or len(shape) != x.ty.ndim or not is_integer(shape[axis], 1):
        return None
    if not _is_row_maximum(shift, scores, axis, scope):
        return Outcome(f"{names([shift])} is not the maximum of {names([scores])} along {axis}")
    dtypes = f"the maximum is subtracted in {shifted.ty.dtype}, the softmax is in {x.ty.dtype}"
    if is_cast:
        return Outcome(f"{dtypes}: it would see scores that were not rounded")
    if str(x.ty.dtype) not in ("float32", "float64"):
        return Outcome(f"{dtypes}: its sum of exponentials may need it")
    reason = (
        f"{names([shift])} is the maximum of {names([scores])} along axis {axis}, which softmax "
        f"subtracts itself, in {x.ty.dtype} too; a row of -inf alone, or with +inf, is NaN in both"
    )
    # a new variable: what the old one read differs by the maximum, so only results compare
    return Outcome(reason, scope.emit(relax.Call(call.op, [scores], call.attrs)))


def _below_cast(x: relax.Expr, scope: Scope) -> tuple[relax.Expr, bool]:
    name, cast = scope.call(x)
    return (cast.args[0], True) if name == "astype" else (x, False)


def _is_row_maximum(shift: relax.Expr, scores: relax.Expr, axis: int, scope: Scope) -> bool:
    """Whether shift[…, 0, …] is max(scores) along `axis`, seen through views."""
    chain = Chain(shift, scope)
    for source, at in [(shift, chain.axes), *chain.below]:
        name, call = scope.call(source)
        if name == "max" and _goes_over(call, scores, axis, scope):
            rows = [i for n, i in enumerate(chain.axes) if n != axis]
            return chain.is_same(rows, _without(at, axis) if call.attrs.keepdims else at)
    return False


def _goes_over(call: relax.Call, scores: relax.Expr, axis: int, scope: Scope) -> bool:
    axes = [int(i) % scores.ty.ndim for i in call.attrs.axis or ()]
    below = resolve(call.args[0], scope.lookup), resolve(scores, scope.lookup)
    is_same = below[0].same_as(below[1]) and structural_equal(call.args[0].ty, scores.ty)
    return is_same and axes == [axis]


def _without(at: list[Index], axis: int) -> list[Index]:
    return [*at[:axis], *at[axis + 1 :]]


STABILISATION_RULE = Rule("double-stabilisation", _OPS, _look)
