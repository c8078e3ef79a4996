"""Index expressions evaluated by NumPy: what the tests of index maps and masks compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx

from relax_passes._tensors import Lookup, resolve, shape_of
from relax_passes.index_analysis.index_domain import Domain
from relax_passes.index_analysis.index_values import IndexValues

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


@dataclass(frozen=True)
class View:
    """Element [axes] of a tensor is source[indices]."""

    source: relax.Expr
    axes: tuple[tirx.Var, ...]
    indices: tuple[Any, ...]


def view_of(expr: relax.Expr, lookup: Lookup) -> View:
    """Views followed back to a tensor that is none."""
    domain, shape = Domain(), shape_of(expr)
    domain.note_shape(shape)
    axes = tuple(domain.axis(f"i{k}", dim) for k, dim in enumerate(shape))
    views = IndexValues(lookup, domain).views
    source, at = expr, [domain.simplify(axis) for axis in axes]
    while (step := views.step(resolve(source, lookup), at)) is not None:
        source, at = step
    while isinstance(source, relax.Var) and isinstance(below := lookup(source), relax.Var):
        source = below
    return View(source, axes, tuple(domain.simplify(index) for index in at))
