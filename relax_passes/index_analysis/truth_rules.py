"""Rules for truth values and choices: comparisons, logic, triangles, and what joins tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import relax

from .._tensors import resolve, shape_of
from .formulas import FALSE, MAX_CASES, TRUE, Formulas
from .index_domain import Domain, Index, integer, is_integer
from .value_casts import INTEGERS, Rule, Unknown, as_float, cast

if TYPE_CHECKING:
    from .index_values import IndexValues


def _comparison(on_integers: Callable[..., Index], on_floats: Callable[..., Any]) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        def fold(a: Index, b: Index) -> Index:
            if str(a.ty) == "int64" and str(b.ty) == "int64":
                return on_integers(values.formulas, a, b)
            if "bool" in (str(a.ty), str(b.ty)):
                raise Unknown
            return TRUE if on_floats(as_float(a), as_float(b)) else FALSE

        return values.formulas.apply(fold, *values.operands(call, at))

    return rule


def _equality(is_equal: bool) -> Rule:
    on_numbers = _comparison(Formulas.equal, operator.eq)

    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        if str(call.args[0].ty.dtype) == "bool":
            result = values.formulas.same(*values.operands(call, at))
        else:
            result = on_numbers(values, call, at)
        return result if is_equal else values.formulas.invert(result)

    return rule


def _logical(combine: Callable[..., Index]) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        if any(str(arg.ty.dtype) != "bool" for arg in call.args):
            raise Unknown
        return combine(values.formulas, *values.operands(call, at))

    return rule


def _where(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    condition, a, b = call.args
    chosen = values.operand(call, condition, at)
    if str(chosen.ty) != "bool":
        raise Unknown
    return values.formulas.branch(
        chosen, lambda: values.operand(call, a, at), lambda: values.operand(call, b, at)
    )


def _triangle(is_lower: bool) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        x, diagonal = call.args
        row, column = at[-2] + diagonal, at[-1]
        ends = (column, row) if is_lower else (row, column)
        kept = values.formulas.at_most(*ends)
        zero = cast(values, integer(0), call)
        return values.formulas.branch(kept, lambda: values.element(x, at), lambda: zero)

    return rule


def _concat(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    parts = resolve(call.args[0], values.lookup)
    if not isinstance(parts, relax.Tuple) or len(parts.fields) > MAX_CASES:
        raise Unknown
    return _part(values, list(parts.fields), int(call.attrs.axis or 0) % len(at), at)


def _part(values: IndexValues, parts: list[relax.Expr], axis: int, at: list[Index]) -> Index:
    first, *rest = parts
    shape = shape_of(first)
    if not rest:
        return values.element(first, at)
    if shape is None:
        raise Unknown
    behind = values.domain.simplify(at[axis] - shape[axis])
    moved = [*at[:axis], behind, *at[axis + 1 :]]
    return values.formulas.branch(
        values.formulas.at_most(behind + 1, integer(0)),
        lambda: values.element(first, at),
        lambda: _part(values, rest, axis, moved),
    )


def _cumsum(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    """Of equal values only: their number times one of them."""
    shape, axis = shape_of(call.args[0]), call.attrs.axis
    if not shape or (axis is None and len(shape) != 1):
        raise Unknown
    along, domain = int(axis or 0) % len(shape), Domain()
    domain.note_shape(shape)
    place = [domain.axis(f"i{n}", dim) for n, dim in enumerate(shape)]
    each = type(values)(values.lookup, domain).element(call.args[0], place)
    if str(each.ty) == "bool":
        each = values.formulas.as_integer(each)
    count = at[along] + (0 if call.attrs.exclusive else 1)
    if not is_integer(each) or str(call.ty.dtype) not in INTEGERS:
        raise Unknown
    return values.domain.simplify(each * count)


TRUTH_RULES: dict[str, Rule] = {
    "less_equal": _comparison(Formulas.at_most, operator.le),
    "greater_equal": _comparison(lambda f, a, b: f.at_most(b, a), operator.ge),
    "less": _comparison(lambda f, a, b: f.at_most(a + 1, b), operator.lt),
    "greater": _comparison(lambda f, a, b: f.at_most(b + 1, a), operator.gt),
    "equal": _equality(is_equal=True),
    "not_equal": _equality(is_equal=False),
    "logical_and": _logical(Formulas.both),
    "bitwise_and": _logical(Formulas.both),
    "logical_or": _logical(Formulas.either),
    "bitwise_or": _logical(Formulas.either),
    "logical_xor": _logical(lambda f, a, b: f.invert(f.same(a, b))),
    "bitwise_xor": _logical(lambda f, a, b: f.invert(f.same(a, b))),
    "logical_not": _logical(Formulas.invert),
    "bitwise_not": _logical(Formulas.invert),
    "where": _where,
    "tril": _triangle(is_lower=True),
    "triu": _triangle(is_lower=False),
    "concat": _concat,
    "cumsum": _cumsum,
}
