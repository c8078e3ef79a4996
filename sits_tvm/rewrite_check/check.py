"""Run both sides of every region that a pass changed, and compare them."""

from __future__ import annotations

from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import IRModule, relax

from relax_passes._adjoint import bindings_of

from ..diagnostics import Diagnostic
from ..host_run import Compile, CompileOnce, Run
from ..report import RewriteCheck
from .draws import BATCHES, LENGTHS, Draw, draws, shape_with
from .float64 import in_float64
from .regions import Region, changed_regions

MAX_BYTES = 2**28
"""Of one tensor in float64; a region that needs more is not run."""


def check_rewrite(before: IRModule, after: IRModule, compile_: Compile) -> list[RewriteCheck]:
    """Compare what a pass changed, on the CPU: one row per changed region of each function.

    An element of the new value is right where it equals the old value in float64, or the old value
    as its own dtypes compute it, to within 16 units in the last place of the largest of them, or
    four times the largest error of the old value. Where an argument holds NaN, elements whose old
    value is NaN are free.

    Parameters
    ----------
    compile_ : module -> (function name, arguments) -> nested lists of arrays
    """
    compiled = CompileOnce(compile_)
    return [
        _check(region, gvar.name_hint, compiled)
        for gvar, func in after.functions_items()
        if isinstance(func, relax.Function) and not func.same_as(before[gvar.name_hint])
        for region in changed_regions(before[gvar.name_hint], func)
    ]


def failure(row: RewriteCheck, pass_name: str) -> Diagnostic:
    """The error for a row that is not ok."""
    message = (
        f"{pass_name} changed the value of `{row.binding}`: difference {row.difference:.1e}, "
        f"limit {row.limit:.1e}, in {row.draw}"
    )
    return Diagnostic.error(
        "rewrite-changes-values",
        message,
        function=row.function,
        binding=row.binding,
        help='Config(attention="off") leaves attention as it is; please report the function',
    )


def _check(region: Region, function: str, compile_: Compile) -> RewriteCheck:
    reason = _too_large(region)
    if reason:
        return RewriteCheck(function, region.binding, 0, 0.0, 0.0, "", reason)
    sides = [compile_(m) for m in (in_float64(region.before), region.before, region.after)]
    results = [(draw.name, *_compare(region, draw, sides)) for draw in draws(region)]
    name, difference, limit = max(results, key=lambda result: result[1] / result[2])
    return RewriteCheck(function, region.binding, len(results), difference, limit, name, "")


def _compare(region: Region, draw: Draw, sides: list[Run]) -> tuple[float, float]:
    """The largest difference that counts, and its limit."""
    dims = tvm.runtime.ShapeTuple(draw.dims)
    wide = [array if array.dtype.kind in "biu" else array.astype(float) for array in draw.arrays]
    exact, old, new = (
        _flat(run("main", [dims, *arrays]))
        for run, arrays in zip(sides, (wide, draw.arrays, draw.arrays), strict=True)
    )
    is_free = np.isnan(exact) & any(np.isnan(array).any() for array in wide)
    is_finite = np.isfinite(exact) & np.isfinite(old)
    largest = np.max(np.abs(exact), where=is_finite, initial=1e-30)
    error = np.max(_distance(old, exact), where=is_finite, initial=0.0)
    distance = np.minimum(_distance(new, exact), _distance(new, old))
    worst = float(np.max(distance, where=~is_free, initial=0.0))
    if "float" not in region.dtype:
        return worst, 0.5  # of integers and truth values: they are equal
    unit = float(ml_dtypes.finfo(region.dtype).eps)
    return worst, float(max(4 * error, 16 * unit * largest))


def _flat(result: Any) -> np.ndarray:
    return np.asarray(result).astype(float).ravel()


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b|; 0 where both are the same, NaN or infinity too, infinite where only one is NaN."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf)
    return np.where(same, 0.0, difference)


def _too_large(region: Region) -> str:
    """Why a region is not run; empty for one that is."""
    dims = dict.fromkeys(region.dims, max(*BATCHES, *LENGTHS))
    for mod in (region.before, region.after):
        for binding in bindings_of(mod["main"]):
            shape = getattr(binding.var.ty, "shape", None)
            size = 8 * prod(shape_with(shape, dims)) if isinstance(shape, relax.ShapeExpr) else 0
            if size > MAX_BYTES:
                return f"not run: `{binding.var.name}` would take {size:,} bytes in float64"
    return ""
