"""Reverse-mode differentiation of straight-line Relax code by the registered gradients.

`relax.transform.Gradient` does the same, but knows no shape expression of symbolic variables,
computes the forward pass a second time where shapes are symbolic, and checks no partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Op
from tvm.relax import op as R

from ._rules import rule_of

Binding = tuple[relax.Var, relax.Expr]
Adjoint = Any  # an expression; for a tuple a list with None where nothing arrived


class PartialError(ValueError):
    """A rule gave a partial whose type is not that of its argument."""


class ReverseMode:
    """Adjoints of variables, built while walking bindings backwards.

    Parameters
    ----------
    bb : BlockBuilder
        Where the adjoints are emitted.
    is_active : (Var) -> bool
        Whether a variable needs its adjoint.
    suffix : str
        Of the names of adjoints; "" leaves the names to `bb`.
    """

    def __init__(
        self, bb: relax.BlockBuilder, is_active: Callable[[relax.Var], bool], suffix: str = ""
    ) -> None:
        self.bb, self.is_active, self.suffix = bb, is_active, suffix
        self._adjoints: dict[relax.Var, Adjoint] = {}

    def adjoint(self, var: relax.Var) -> relax.Expr | None:
        """What has arrived at `var`, or None."""
        found = self._adjoints.get(var)
        return None if found is None else self._whole(found, var)

    def step(self, var: relax.Var, value: relax.Expr) -> None:
        """Pass the adjoint of `var` on to what the bound `value` reads."""
        adjoint = self._adjoints.get(var)
        if adjoint is None:
            return
        if isinstance(value, relax.Call):
            self._call(var, value)
        elif isinstance(value, relax.TupleGetItem):
            parts = [None] * len(value.tuple_value.ty.fields)
            parts[value.index] = adjoint
            self.add(value.tuple_value, parts)
        else:
            self.add(value, adjoint)

    def _call(self, var: relax.Var, call: relax.Call) -> None:
        rule = rule_of(call.op)
        assert rule is not None, call.op  # what has none is no path
        partials = rule(var, call, self.adjoint(var), self.bb)
        if len(partials) != len(call.args):
            raise PartialError(f"{len(partials)} partials for {len(call.args)} arguments")
        for arg, partial in zip(call.args, partials, strict=True):
            if not is_no_grad(partial):
                self.add(arg, partial)

    def add(self, expr: relax.Expr, partial: Adjoint) -> None:
        """Add `partial` to the adjoint of `expr`, a variable or a tuple of them."""
        if partial is None or (isinstance(expr, relax.Var) and not self.is_active(expr)):
            return
        if isinstance(expr, relax.Tuple):
            for field, part in zip(expr, self._parts(partial), strict=True):
                self.add(field, part)
        elif isinstance(expr, relax.Var):
            self._adjoints[expr] = self._sum(self._adjoints.get(expr), partial, expr)

    def _sum(self, old: Adjoint, new: Adjoint, like: relax.Var) -> Adjoint:
        if isinstance(like.ty, relax.TupleType):
            parts = self._parts(new)
            olds = old if old is not None else [None] * len(parts)
            pairs = zip(olds, parts, like.ty.fields, strict=True)
            return [self._leaf_sum(a, b, ty, like) for a, b, ty in pairs]
        return self._leaf_sum(old, new, like.ty, like)

    def _leaf_sum(self, old: Adjoint, new: Adjoint, ty: tvm.ir.Type, like: relax.Var) -> Adjoint:
        if new is None or is_no_grad(new):
            return old
        new = self._emit(new, like)
        _check_partial(new.ty, ty)
        return new if old is None else self._emit(R.add(old, new), like)

    def _emit(self, expr: relax.Expr, like: relax.Var) -> relax.Var:
        if not self.suffix:
            return expr if isinstance(expr, relax.Var) else self.bb.emit(expr)
        return self.bb.emit(expr, f"{like.name}{self.suffix}")

    def _parts(self, partial: Adjoint) -> list[Adjoint]:
        if isinstance(partial, list):
            return partial
        if isinstance(partial, relax.Tuple):
            return list(partial)
        whole = self.bb.emit(partial)
        return [relax.TupleGetItem(whole, i) for i in range(len(whole.ty.fields))]

    def _whole(self, adjoint: Adjoint, var: relax.Var) -> relax.Expr:
        """One expression of a list with gaps: zeros in them."""
        if not isinstance(adjoint, list):
            return adjoint
        pairs = zip(adjoint, var.ty.fields, strict=True)
        fields = [zeros(ty) if part is None else part for part, ty in pairs]
        return self._emit(relax.Tuple(fields), var)


def zeros(ty: relax.TensorType) -> relax.Expr:
    return R.zeros(ty.shape, str(ty.dtype))


def is_no_grad(expr: Adjoint) -> bool:
    return isinstance(expr, relax.Call) and expr.op == Op.get("relax.grad.no_grad")


def _check_partial(partial: tvm.ir.Type, ty: tvm.ir.Type) -> None:
    """An integer (a quantized code) has an adjoint of any float dtype; else dtypes agree."""
    if str(ty.dtype).startswith(("float", "bfloat")) and partial.dtype != ty.dtype:
        raise PartialError(f"a partial of {partial.dtype} for an argument of {ty.dtype}")
    shapes = [partial.shape, ty.shape]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return
    if len(shapes[0]) != len(shapes[1]) or any(map(_differ, *shapes)):
        raise PartialError(f"a partial of shape {shapes[0]} for an argument of {shapes[1]}")


def _differ(a: tvm.ir.Expr, b: tvm.ir.Expr) -> bool:
    return all(isinstance(x, tvm.tirx.IntImm) for x in (a, b)) and int(a) != int(b)


def vector_jacobian(
    bb: relax.BlockBuilder, output: relax.Expr, grad: relax.Expr, inputs: Sequence[relax.Expr]
) -> list[relax.Expr]:
    """Partials with respect to `inputs` of what `bb` has emitted between them and `output`."""
    bindings = list(_between(bb, output, inputs))
    reached = {var for var, _ in bindings} | {x for x in inputs if isinstance(x, relax.Var)}
    walk = ReverseMode(bb, lambda var: var in reached and not _is_integral(var.ty))
    walk.add(output, grad)
    for var, value in reversed(bindings):
        walk.step(var, value)
    return [_once(walk, inputs, i) for i in range(len(inputs))]


def _once(walk: ReverseMode, inputs: Sequence[relax.Expr], i: int) -> relax.Expr:
    """The adjoint of an input, at the first of several places where it is given."""
    x = inputs[i]
    is_repeated = any(x.same_as(earlier) for earlier in inputs[:i])
    adjoint = None if is_repeated or not isinstance(x, relax.Var) else walk.adjoint(x)
    return R.grad.no_grad(x) if adjoint is None else adjoint


def _between(
    bb: relax.BlockBuilder, output: relax.Expr, inputs: Iterable[relax.Expr]
) -> Iterable[Binding]:
    """The bindings that `output` is computed by, in order, from `inputs` on."""
    done = {x for x in inputs if isinstance(x, relax.Var)}
    found: dict[relax.Var, relax.Expr] = {}

    def visit(var: relax.Var) -> None:
        value = None if var in done else bb.lookup_binding(var)
        done.add(var)
        if value is not None:
            for used in relax.analysis.free_vars(value):
                visit(used)
            found[var] = value

    visit(output)
    return found.items()


def _is_integral(ty: tvm.ir.Type) -> bool:
    return isinstance(ty, relax.TensorType) and not str(ty.dtype).startswith(("float", "bfloat"))
