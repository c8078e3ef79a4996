"""What the rules of the interpreter of index arithmetic share: casts, and numbers of a dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from tvm import relax, tirx

from .formulas import FALSE, TRUE, Formulas, cases, real
from .index_domain import Index, integer

if TYPE_CHECKING:
    from .index_values import IndexValues

INTEGERS = ("int32", "int64")
NARROW = ("int8", "uint8", "int16")  # hold truth values; sums of them might wrap around
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Unknown(Exception):
    """A value that follows from no rule."""


Rule = Callable[["IndexValues", relax.Call, list[Index]], Index]


def cast(values: IndexValues, value: Index, call: relax.Call) -> Index:
    """`value` in the dtype of `call`."""
    dtype, formulas = str(call.ty.dtype), values.formulas
    if dtype == "bool":
        return formulas.apply(lambda x: _as_truth(formulas, x), value)
    if str(value.ty) == "bool":
        value = formulas.as_integer(value)
    if dtype in FLOATS:
        return formulas.apply(lambda x: real(rounded(as_float(x), dtype)), value)
    is_small = all(isinstance(x, tirx.IntImm) and 0 <= int(x) < 128 for x in cases(value))
    if str(value.ty) == "int64" and (dtype in INTEGERS or (dtype in NARROW and is_small)):
        return value
    raise Unknown


def converted(
    values: IndexValues, source: relax.Expr, at: Sequence[Index], call: relax.Call
) -> Index:
    """`source[at]` in the dtype of `call`, which may be too narrow for a run-time integer."""
    value, dtype = values.element(source, at), str(call.ty.dtype)
    narrows = not np.can_cast(numpy_dtype(str(source.ty.dtype)), numpy_dtype(dtype))
    if dtype in INTEGERS and narrows:
        domain = values.domain
        if not all(domain.is_bounded(domain.polynomial(x)) for x in cases(value)):
            raise Unknown
    return cast(values, value, call)


def _as_truth(formulas: Formulas, value: Index) -> Index:
    if str(value.ty) == "bool":
        return value
    if str(value.ty) == "int64":
        return formulas.invert(formulas.equal(value, integer(0)))
    return TRUE if as_float(value) != 0 else FALSE


def as_float(value: Index) -> float:
    if isinstance(value, tirx.IntImm):
        return float(int(value))
    if not isinstance(value, tirx.FloatImm):
        raise Unknown
    return float(value.value)


def rounded(value: float, dtype: str) -> float:
    """`value` as `dtype` holds it; a NaN follows no rule."""
    with np.errstate(over="ignore"):
        result = float(np.asarray(value).astype(numpy_dtype(dtype)))
    if np.isnan(result):
        raise Unknown
    return result


def numpy_dtype(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
