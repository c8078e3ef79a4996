"""What each op computes at a place: the rules of the interpreter of index arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from tvm import relax, tirx

from relax_passes._formulas import FALSE, TRUE, Formulas, real
from relax_passes._index_domain import Index, integer, is_integer
from relax_passes._view_steps import resolve, shape_of

if TYPE_CHECKING:
    from relax_passes._index_values import IndexValues

INTEGERS = ("int32", "int64")  # narrower ones may wrap around
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Unknown(Exception):
    """A value that follows from no rule."""


Rule = Callable[["IndexValues", relax.Call, list[Index]], Index]


def _arange(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    start, _, step = call.args[:3]
    if str(call.ty.dtype) not in INTEGERS or "int" not in str(start.ty) + str(step.ty):
        raise Unknown
    return values.domain.simplify(start + at[0] * step)


def _full(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    return _cast(values, values.element(call.args[1], []), call)


def _filled(number: int) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        return _cast(values, integer(number), call)

    return rule


def _eye(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    on_diagonal = values.formulas.equal(at[-1], at[-2] + call.args[-1])
    return _cast(values, values.formulas.as_integer(on_diagonal), call)


def _triangle(is_lower: bool) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        x, diagonal = call.args
        row, column = at[-2] + diagonal, at[-1]
        ends = (column, row) if is_lower else (row, column)
        kept = values.formulas.at_most(*ends)
        zero = _cast(values, integer(0), call)
        return values.formulas.branch(kept, lambda: values.element(x, at), lambda: zero)

    return rule


def _astype(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    return _cast(values, values.element(call.args[0], at), call)


def _cast(values: IndexValues, value: Index, call: relax.Call) -> Index:
    """`value` in the dtype of `call`."""
    dtype, formulas = str(call.ty.dtype), values.formulas
    if dtype == "bool":
        return formulas.apply(lambda x: _as_truth(formulas, x), value)
    if str(value.ty) == "bool":
        value = formulas.as_integer(value)
    if dtype in INTEGERS and str(value.ty) == "int64":
        return value
    if dtype in FLOATS:
        return formulas.apply(lambda x: real(_number(_float(x), dtype)), value)
    raise Unknown


def _as_truth(formulas: Formulas, value: Index) -> Index:
    if str(value.ty) == "bool":
        return value
    if str(value.ty) == "int64":
        return formulas.invert(formulas.equal(value, integer(0)))
    return TRUE if _float(value) != 0 else FALSE


def _float(value: Index) -> float:
    if isinstance(value, tirx.IntImm):
        return float(int(value))
    if not isinstance(value, tirx.FloatImm):
        raise Unknown
    return float(value.value)


def _number(value: float, dtype: str) -> float:
    """Rounded to `dtype`; a NaN follows no rule."""
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(value).astype(_numpy(dtype)))
    if np.isnan(rounded):
        raise Unknown
    return rounded


def _numpy(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def _arithmetic(operation: Callable[[Any, Any], Any]) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        dtype = str(call.ty.dtype)

        def fold(a: Index, b: Index) -> Index:
            if dtype in INTEGERS:
                return values.domain.simplify(operation(a, b))
            x, y = (np.asarray(_float(v)).astype(_numpy(dtype)) for v in (a, b))
            with np.errstate(all="ignore"):
                return real(_number(operation(x, y), dtype))

        if dtype not in INTEGERS + FLOATS:
            raise Unknown
        return values.formulas.apply(fold, *values.operands(call, at))

    return rule


def _extremum(is_minimum: bool) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        formulas, dtype = values.formulas, str(call.ty.dtype)

        def fold(a: Index, b: Index) -> Index:
            if dtype in INTEGERS:
                return formulas.least(a, b) if is_minimum else formulas.greatest(a, b)
            return real((min if is_minimum else max)(_float(a), _float(b)))

        if dtype not in INTEGERS + FLOATS:
            raise Unknown
        return formulas.apply(fold, *values.operands(call, at))

    return rule


def _quotient(part: int) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        def fold(a: Index, b: Index) -> Index:
            if not is_integer(b) or int(b) <= 0 or not values.domain.is_natural(a):
                raise Unknown
            return values.domain.divide(a, b)[part]

        if str(call.ty.dtype) not in INTEGERS:
            raise Unknown
        return values.formulas.apply(fold, *values.operands(call, at))

    return rule


def _negative(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    zero = _cast(values, integer(0), call)
    is_float = str(call.ty.dtype) in FLOATS

    def fold(x: Index) -> Index:
        return real(-_float(x)) if is_float else values.domain.simplify(zero - x)

    return values.formulas.apply(fold, values.element(call.args[0], at))


def _absolute(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    formulas = values.formulas

    def fold(x: Index) -> Index:
        if str(call.ty.dtype) in FLOATS:
            return real(abs(_float(x)))
        if str(call.ty.dtype) not in INTEGERS:
            raise Unknown
        return formulas.choose(formulas.at_most(integer(0), x), x, values.domain.simplify(-x))

    return formulas.apply(fold, values.element(call.args[0], at))


def _comparison(on_integers: Callable[..., Index], on_floats: Callable[..., Any]) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        def fold(a: Index, b: Index) -> Index:
            if str(a.ty) == "int64" and str(b.ty) == "int64":
                return on_integers(values.formulas, a, b)
            if "bool" in (str(a.ty), str(b.ty)):
                raise Unknown
            return TRUE if on_floats(_float(a), _float(b)) else FALSE

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
    """Of truth values; the second one is made only if the first does not decide."""

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


def _concat(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    parts = resolve(call.args[0], values.lookup)
    if not isinstance(parts, relax.Tuple):
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
    if shape is None or (axis is None and len(shape) != 1):
        raise Unknown
    along = int(axis or 0) % len(shape)
    inner = values.domain.axis("summed", shape[along])
    place = [*at[:along], inner, *at[along + 1 :]]
    each = values.element(call.args[0], place)
    if str(each.ty) == "bool":
        each = values.formulas.as_integer(each)
    count = at[along] + (0 if call.attrs.exclusive else 1)
    if not is_integer(each) or str(call.ty.dtype) not in INTEGERS:
        raise Unknown
    return values.domain.simplify(each * count)


RULES: dict[str, Rule] = {
    f"relax.{name}": rule
    for name, rule in {
        "arange": _arange,
        "full": _full,
        "full_like": _full,
        "ones": _filled(1),
        "ones_like": _filled(1),
        "zeros": _filled(0),
        "zeros_like": _filled(0),
        "eye": _eye,
        "tril": _triangle(is_lower=True),
        "triu": _triangle(is_lower=False),
        "astype": _astype,
        "add": _arithmetic(operator.add),
        "subtract": _arithmetic(operator.sub),
        "multiply": _arithmetic(operator.mul),
        "minimum": _extremum(is_minimum=True),
        "maximum": _extremum(is_minimum=False),
        "floor_divide": _quotient(0),
        "floor_mod": _quotient(1),
        "mod": _quotient(1),
        "negative": _negative,
        "abs": _absolute,
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
        "concat": _concat,
        "cumsum": _cumsum,
    }.items()
}
