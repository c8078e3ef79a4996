"""Split a loop where a branch inside it changes sides, so that neither part has the branch."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.sym import Analyzer
from tvm.tirx import Expr, For, Stmt, Var

from ..tir_nodes import collect, is_branch, is_const, substitute

# Parts a loop may be split into: a concat of this many inputs.
_MOST_PARTS = 4


def split_at_branches(loop: For, body: Stmt, analyzer: Analyzer) -> list[tuple[Expr, Expr, Stmt]]:
    """(first, extent, body) of consecutive parts of `loop`, with branches on its variable decided.

    ``for j < 8: a[j] = if_then_else(j < 5, x[j], y[j - 5])`` becomes ``for j < 5: a[j] = x[j]`` and
    ``for 5 <= j < 8: a[j] = y[j - 5]``. Concatenation, padding, rotary embeddings and triangular
    masks are of this kind. A branch is split where its condition compares the loop's variable
    with something that does not depend on it.
    """
    zero = tirx.const(0, loop.loop_var.ty.dtype)
    parts = [(zero, loop.extent, body)]
    done: list[tuple[Expr, Expr, Stmt]] = []
    while parts:
        first, extent, stmt = parts.pop()
        found = _first_branch(stmt, loop.loop_var, analyzer)
        if found is None or len(parts) + len(done) + 2 > _MOST_PARTS:
            done.append((first, extent, stmt))
            continue
        condition, bound, below = found
        cut = analyzer.simplify(tirx.max(tirx.min(bound, first + extent), first) - first)
        rest = analyzer.simplify(extent - cut)
        parts.append((first + cut, rest, _decided(stmt, condition, not below)))
        parts.append((first, cut, _decided(stmt, condition, below)))
    return [part for part in done if not is_const(part[1], 0)]


def _first_branch(stmt: Stmt, var: Var, analyzer: Analyzer) -> tuple[Expr, Expr, bool] | None:
    """(condition, bound, value below the bound) of the first branch that `var` decides."""
    conditions = [call.args[0] for call in collect(stmt, Call) if is_branch(call)]
    for condition in conditions:
        for term in _conjuncts(condition):
            bound = _bound(term, var, analyzer)
            if bound is not None:
                return term, *bound
    return None


def _conjuncts(condition: Expr) -> Sequence[Expr]:
    if isinstance(condition, (tirx.And, tirx.Or)):
        return [*_conjuncts(condition.a), *_conjuncts(condition.b)]
    return [condition]


def _bound(condition: Expr, var: Var, analyzer: Analyzer) -> tuple[Expr, bool] | None:
    """The value of `var` at which `condition` changes, and whether it holds below."""
    if isinstance(condition, (tirx.LT, tirx.LE)):
        less, more = condition.a, condition.b
    elif isinstance(condition, (tirx.GT, tirx.GE)):
        less, more = condition.b, condition.a
    else:
        return None
    strict = isinstance(condition, (tirx.LT, tirx.GT))
    if str(less.ty.dtype) != str(var.ty.dtype):
        return None
    difference = less - more  # holds if negative, or zero unless strict
    one = tirx.const(1, var.ty.dtype)
    offset = analyzer.simplify(substitute(difference, {var: one - one}))
    slope = analyzer.simplify(difference - offset - var)
    if is_const(slope, 0):  # var + offset < 0
        return (-offset if strict else one - offset), True
    slope = analyzer.simplify(difference - offset + var)
    if is_const(slope, 0):  # offset - var < 0
        return (offset + one if strict else offset), False
    return None


def _decided(stmt: Stmt, condition: Expr, value: bool) -> Stmt:
    """`stmt` where `condition` is known."""
    constant = tirx.const(value, "bool")

    def replace(node: Expr) -> Expr:
        return constant if tvm_ffi.structural_equal(node, condition) else node

    def choose(call: Call) -> Expr:
        if not is_branch(call):
            return call
        test, yes, no = call.args
        test = Analyzer().simplify(test)
        if isinstance(test, tirx.IntImm):
            return yes if test.value else no
        return tirx.if_then_else(test, yes, no)

    kinds = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)
    return tvm_ffi.structural_map(stmt, [(kinds, replace), (Call, choose)], order="post")
