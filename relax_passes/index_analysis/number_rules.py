"""Rules for numbers: what creates positions and constants, and arithmetic on them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax

from .._tensors import resolve
from .formulas import real
from .index_domain import Index, integer, is_integer
from .value_casts import (
    FLOATS,
    INTEGERS,
    Rule,
    Unknown,
    as_float,
    cast,
    converted,
    numpy_dtype,
    rounded,
)

if TYPE_CHECKING:
    from .index_values import IndexValues


def _arange(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    start, _, step = call.args[:3]
    if str(call.ty.dtype) not in INTEGERS or not all("int" in str(x.ty) for x in (start, step)):
        raise Unknown
    return values.domain.simplify(start + at[0] * step)


def _full(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    return converted(values, call.args[1], [], call)


def _filled(number: int) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        return cast(values, integer(number), call)

    return rule


def _dimension(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    """One of the dimensions that torch.export passes on as a tensor."""
    shape = resolve(call.args[0], values.lookup)
    if not isinstance(shape, relax.ShapeExpr) or not (is_integer(at[0]) or len(shape.values) == 1):
        raise Unknown
    dims = list(shape.values)
    return values.domain.simplify(dims[int(at[0]) if len(dims) > 1 else 0])


def _eye(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    on_diagonal = values.formulas.equal(at[-1], at[-2] + call.args[-1])
    return cast(values, values.formulas.as_integer(on_diagonal), call)


def _astype(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    return converted(values, call.args[0], at, call)


def _arithmetic(operation: Callable[[Any, Any], Any]) -> Rule:
    def rule(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
        dtype, domain = str(call.ty.dtype), values.domain

        def fold(a: Index, b: Index) -> Index:
            if dtype in INTEGERS:
                return domain.expression(operation(domain.polynomial(a), domain.polynomial(b)))
            x, y = (np.asarray(as_float(v)).astype(numpy_dtype(dtype)) for v in (a, b))
            with np.errstate(all="ignore"):
                return real(rounded(operation(x, y), dtype))

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
            return real((min if is_minimum else max)(as_float(a), as_float(b)))

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
    def fold(x: Index) -> Index:
        if str(call.ty.dtype) in FLOATS:
            return real(-as_float(x))
        if str(call.ty.dtype) not in INTEGERS:
            raise Unknown
        return values.domain.simplify(-x)

    return values.formulas.apply(fold, values.element(call.args[0], at))


def _absolute(values: IndexValues, call: relax.Call, at: list[Index]) -> Index:
    formulas = values.formulas

    def fold(x: Index) -> Index:
        if str(call.ty.dtype) in FLOATS:
            return real(abs(as_float(x)))
        if str(call.ty.dtype) not in INTEGERS:
            raise Unknown
        return formulas.choose(formulas.at_most(integer(0), x), x, values.domain.simplify(-x))

    return formulas.apply(fold, values.element(call.args[0], at))


NUMBER_RULES: dict[str, Rule] = {
    "arange": _arange,
    "full": _full,
    "full_like": _full,
    "ones": _filled(1),
    "ones_like": _filled(1),
    "zeros": _filled(0),
    "zeros_like": _filled(0),
    "eye": _eye,
    "shape_to_tensor": _dimension,
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
}
