"""Zero points of a chain as the quantize ops take them: codes, or floats to round and clip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax

from .._values import Values
from ..op._affine import FLOATS, INTEGERS
from .events import Parameter, Refused, is_integer


@dataclass(frozen=True)
class _Value:
    """A value computed from `base` so that, once rounded and clipped to the codes, both are equal.

    `rounded` and `clipped`: whether it is an integer, and whether it lies in the range of the
    codes, already.
    """

    base: relax.Expr
    rounded: bool
    clipped: bool


def code_of(values: Values, zero: Parameter, lo: float, hi: float) -> Parameter:
    """`zero` as the op takes it. Raises Refused where it may be no code of lo…hi."""
    array = values.constant(zero.expr)
    if array is not None:
        return _constant(zero, array, lo, hi)
    base, shape = values.unstretched(zero.expr)
    value = _behind(values, base, lo, hi)
    dtype = str(value.base.ty.dtype)
    if not (value.rounded and value.clipped):
        raise _no_code(dtype, lo, hi)
    if dtype not in (*INTEGERS, *FLOATS):
        message = f"the zero point is {dtype}; the op takes {', '.join((*INTEGERS, *FLOATS))}"
        raise Refused("zero-point-dtype", message, "use an int32 zero point")
    return Parameter(value.base, zero.axis, None if zero.axis is not None else shape)


def _no_code(dtype: str, lo: float, hi: float) -> Refused:
    return Refused(
        "zero-point-range",
        f"the zero point, {dtype}, may be no code of {lo:.0f}…{hi:.0f}: the op would round and "
        "clip it",
        f"write R.clip(R.round(zero_point), {lo:.0f}, {hi:.0f}), or bind it to a constant",
    )


def _constant(zero: Parameter, array: np.ndarray, lo: float, hi: float) -> Parameter:
    outside = array[~((array >= lo) & (array <= hi) & (array == np.round(array)))]
    if outside.size:
        message = f"the zero point {outside.flat[0]} is not a code of {lo:.0f}…{hi:.0f}"
        raise Refused("zero-point-range", message)
    if str(array.dtype) in (*INTEGERS, *FLOATS):
        return zero
    return replace(zero, expr=relax.const(array.astype("int32")))


def _behind(values: Values, zero: relax.Expr, lo: float, hi: float) -> _Value:
    """The roundings, clips and casts that make `zero`, run forwards from where they start."""
    steps: list[relax.Expr] = []
    name, call = values.call(zero)
    while name in ("astype", "round", "clip"):
        steps.append(zero)
        zero = call.args[0]
        name, call = values.call(zero)
    value = _start(zero, lo, hi)
    for step in reversed(steps):
        value = _after(values, value, step, lo, hi)
    return value


def _start(expr: relax.Expr, lo: float, hi: float) -> _Value:
    dtype = str(expr.ty.dtype)
    if not is_integer(dtype):
        return _Value(expr, False, False)
    info = np.iinfo(dtype)
    return _Value(expr, True, bool(lo <= info.min and info.max <= hi))


def _after(values: Values, value: _Value, step: relax.Expr, lo: float, hi: float) -> _Value:
    """What `step` makes of `value`; where it changes the code, the base is its result."""
    name, call = values.call(step)
    if name == "round":
        return replace(value, rounded=True)
    if name == "astype":
        return value if _keeps(value, call, lo, hi) else _cast(step, call, lo, hi)
    low, high = (values.number(bound) for bound in call.args[1:])
    if low is None or high is None:
        return _start(step, lo, hi)
    inside = lo <= low and high <= hi
    if low <= lo and hi <= high:
        return replace(value, clipped=value.clipped or inside)
    return replace(_start(step, lo, hi), clipped=inside)


def _keeps(value: _Value, cast: Any, lo: float, hi: float) -> bool:
    """Whether a cast leaves the code what it is."""
    source, dtype = (str(e.ty.dtype) for e in (cast.args[0], cast))
    is_code = value.rounded and value.clipped
    if not is_integer(dtype):
        widens = source in FLOATS and dtype in (source, "float32")
        return dtype in FLOATS and (is_code or is_integer(source) or widens)
    if is_code and _holds(dtype, lo, hi):
        return True
    return is_integer(source) and _holds(dtype, np.iinfo(source).min, np.iinfo(source).max)


def _cast(step: relax.Expr, cast: Any, lo: float, hi: float) -> _Value:
    """A cast that changes the code; that of a float to an integer would cut its gradient."""
    source = str(cast.args[0].ty.dtype)
    if is_integer(str(cast.ty.dtype)) and "float" in source:
        raise _no_code(source, lo, hi)
    return _start(step, lo, hi)


def _holds(dtype: str, lo: float, hi: float) -> bool:
    info = np.iinfo(dtype)
    return bool(info.min <= lo and hi <= info.max)
