"""Rotary embedding, which turns pairs of elements and so keeps the norm of a vector."""

from __future__ import annotations

from tvm import relax

from .._tensors import resolve, shape_of
from ..index_analysis.index_domain import Index
from .rule import Scope
from .views import Chain


def unrotated(x: relax.Expr, scope: Scope) -> relax.Expr | None:
    """y of y · cos(a) + (-y₂, y₁) · sin(a), with y₁, y₂ the halves of y and a of equal halves.

    Elements i and i + D/2 of y are turned by the angle aᵢ.
    """
    name, add = scope.call(x)
    if name != "add":
        return None
    for straight, crossed in ((0, 1), (1, 0)):
        y, cosine = _factors(add.args[straight], "cos", scope)
        turned, sine = _factors(add.args[crossed], "sin", scope)
        if cosine is None or sine is None or not cosine.same_as(sine):
            continue
        if _has_equal_halves(cosine, scope) and _is_quarter_turn(turned, y, scope):
            return y
    return None


def _factors(
    x: relax.Expr, function: str, scope: Scope
) -> tuple[relax.Expr | None, relax.Expr | None]:
    """(z, a) of z · cos(a), with a broadcast, the last axis in its place."""
    name, multiply = scope.call(x)
    for z, table in ((0, 1), (1, 0)) if name == "multiply" else ():
        angle = _angle(multiply.args[table], function, scope)
        if angle is not None and shape_of(multiply.args[z]) is not None:
            return multiply.args[z], angle
    return None, None


def _angle(table: relax.Expr, function: str, scope: Scope) -> relax.Expr | None:
    if shape_of(table) is None or not scope.call(table)[0]:
        return None
    chain = Chain(table, scope)
    for source, at in [(table, chain.axes), *chain.below]:
        name, call = scope.call(source)
        if name == function and chain.domain.is_equal(at[-1], chain.axes[-1]):
            return call.args[0]
    return None


def _has_equal_halves(angle: relax.Expr, scope: Scope) -> bool:
    fields = _last_axis_fields(angle, scope)
    return len(fields) == 2 and fields[0].same_as(fields[1])


def _last_axis_fields(x: relax.Expr, scope: Scope) -> list[relax.Expr]:
    name, concat = scope.call(x)
    if name != "concat" or int(concat.attrs.axis or 0) % x.ty.ndim != x.ty.ndim - 1:
        return []
    fields = resolve(concat.args[0], scope.lookup)
    return list(fields.fields) if isinstance(fields, relax.Tuple) else []


def _is_quarter_turn(turned: relax.Expr | None, y: relax.Expr | None, scope: Scope) -> bool:
    """Whether `turned` is (-y₂, y₁)."""
    if turned is None or y is None:
        return False
    fields = _last_axis_fields(turned, scope)
    if len(fields) != 2 or scope.call(fields[0])[0] != "negative":
        return False
    second = scope.call(fields[0])[1].args[0]
    half, shape = shape_of(second), list(y.ty.shape)
    if half is None or shape_of(fields[1]) is None:
        return False
    return _begins(second, y, half[-1], scope) and _begins(
        fields[1], y, shape[-1] - half[-1] * 2, scope
    )


def _begins(part: relax.Expr, y: relax.Expr, begin: Index, scope: Scope) -> bool:
    """Whether part[…, i] is y[…, begin + i]."""
    chain = Chain(part, scope)
    return any(
        source.same_as(y) and chain.is_same(at, [*chain.axes[:-1], chain.axes[-1] + begin])
        for source, at in chain.below
    )
