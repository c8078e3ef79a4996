"""A pass that is compared with its input each time it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.ir.transform import Pass, PassContext
from tvm.runtime import Tensor

from ..diagnostics import emit
from ..host_run import Compile
from ..report import Report
from .check import check_rewrite, failure


def checked(
    pass_: Pass,
    compile_: Compile,
    report: Report,
    weights: Mapping[str, Tensor | np.ndarray] | None = None,
) -> Pass:
    """`pass_`, whose name it keeps, and an error for each value that it changes.

    Rows go to `report.rewrite_checks`. Each side reads `weights` as they are then: a pass that
    rewrites for the values of weights may change them, too.
    """
    name = str(pass_.info.name)

    @tvm.transform.module_pass(opt_level=0, name=name)
    def run(mod: IRModule, _ctx: PassContext) -> IRModule:
        given = {} if weights is None else dict(weights)
        after = pass_(mod)
        sides = _bound(mod, after, given, weights or {})
        rows = [replace(row, pass_name=name) for row in check_rewrite(*sides, compile_)]
        report.rewrite_checks += rows
        for row in rows:
            if not row.difference <= row.limit:
                emit(failure(row, name))
        return after

    return run


def _bound(
    before: IRModule,
    after: IRModule,
    old: Mapping[str, Tensor | np.ndarray],
    new: Mapping[str, Tensor | np.ndarray],
) -> tuple[IRModule, IRModule]:
    """Both modules, with constants for weights of functions that changed."""
    sides = before.clone(), after.clone()
    for gvar, func in after.functions_items():
        if not isinstance(func, relax.Function) or func.same_as(before[gvar.name_hint]):
            continue
        for side, weights in zip(sides, (old, new), strict=True):
            side[gvar.name_hint] = _with_constants(side[gvar.name_hint], weights)
    return sides


def _with_constants(
    func: relax.Function, weights: Mapping[str, Tensor | np.ndarray]
) -> relax.Function:
    first = int((func.attrs or {}).get("num_input", len(func.params)))
    found = {v: weights[v.name] for v in func.params[first:] if v.name in weights}
    tensors = {v: x if isinstance(x, Tensor) else tvm.runtime.tensor(x) for v, x in found.items()}
    return func.bind_params(tensors) if tensors else func
