"""Index expressions evaluated by NumPy: what the tests of index maps and masks compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import relax, tirx

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
}


def evaluate(expr: Any, values: Mapping[tirx.Var, Any]) -> Any:
    """The value of an index expression, elementwise for array values of its variables."""
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tirx.Var):
        return next(value for var, value in values.items() if var.same_as(expr))
    return _BINARY[type(expr)](evaluate(expr.a, values), evaluate(expr.b, values))


def function_of(
    inputs: list[relax.Var], build: Callable[[relax.BlockBuilder], relax.Expr]
) -> tuple[relax.Expr, Callable[[relax.Var], relax.Expr | None]]:
    """The result variable of a function of one dataflow block, and what its variables are."""
    bb = relax.BlockBuilder()
    with bb.function("main", inputs):
        with bb.dataflow():
            result = bb.emit_output(build(bb))
        bb.emit_func_output(result)
    bindings = relax.analysis.get_var2val(bb.get()["main"])
    return result, lambda var: bindings.get(var)
