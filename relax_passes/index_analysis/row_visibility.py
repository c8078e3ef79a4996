"""Whether every query of an attention sees a key: then the rows of its softmax sum to 1."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from .visibility import Visibility, every_row_sees_a_key


def no_row_is_empty(call: relax.Call) -> bool:
    """Proved from the attributes of the op; a bias may hide any key, so there must be none."""
    if len(call.args) > 3:
        return False
    q, k = list(call.args[0].ty.shape), list(call.args[1].ty.shape)
    window = int(call.attrs["window"])
    offset = _offset(call.attrs["causal"], q[2], k[2])
    upper = None if call.attrs["causal"] is None else offset
    lower = offset - window + 1 if window else None
    return every_row_sees_a_key(Visibility(upper, lower), [*q[:3], k[2]])


def _offset(
    causal: str | int | None, num_queries: tvm.ir.Expr, num_keys: tvm.ir.Expr
) -> tvm.ir.Expr:
    if causal == "bottom_right":
        return tvm.sym.Analyzer().simplify(num_keys - num_queries)
    return tirx.const(int(causal or 0), "int64")
