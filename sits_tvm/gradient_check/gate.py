"""The gate: compiled gradients against a float64 reference of the same surrogate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tvm import IRModule

from relax_passes._adjoint import SUFFIX

from ..diagnostics import Diagnostic, SitsError
from ..host_run import Compile
from ..report import Report
from ._comparison import Comparison
from ._instrument import Instrumented, instrument
from .decisions import undecided
from .result import GradientRow, summarize
from .twin import Twin
from .vectors import draw_vectors

SEEDS = (0, 1, 2)
LOSS_SCALES = (0.1, 1.0, 10.0)


def run_gate(
    mod: IRModule,
    name: str,
    compile_: Compile,
    *,
    given: Mapping[str, np.ndarray],
    seeds: Sequence[int],
    loss_scales: Sequence[float],
    require_grads: Sequence[str] | None = None,
) -> tuple[list[GradientRow], list[Diagnostic]]:
    """Compare ``<name>_adjoint``, as `compile_` builds it, with autograd of the twin of `name`.

    Parameters
    ----------
    compile_ : module -> (function name, arguments) -> nested lists of arrays
    given : mapping of name to array
        Arguments to use; the others are drawn, see `draw_vectors`.

    Returns
    -------
    rows
        One per array, vector and loss scale.
    diagnostics
        An error per array that fails, a warning per decision that no vector decides.

    Raises
    ------
    SitsError
        If the twin has no rule for an op, or PyTorch is missing.
    """
    twin = Twin(mod, name)
    tested = instrument(mod, name, require_grads)
    vectors = draw_vectors(tested.adjoint.forward, name, given, seeds)
    scales = loss_scales if tested.adjoint.seed is not None else (1.0,)
    comparison = Comparison(twin, tested, compile_(tested.mod), scales)
    rows = [row for vector in vectors for row in comparison.rows(vector)]
    return rows, [*_no_seed(tested), *_failures(tested, rows), *undecided(twin, vectors)]


def report_gate(mod: IRModule, name: str, compile_: Compile, report: Report) -> list[Diagnostic]:
    """`run_gate` on drawn arguments; fills `report.gradients`, and raises nothing."""
    try:
        rows, found = run_gate(mod, name, compile_, given={}, seeds=SEEDS, loss_scales=LOSS_SCALES)
    except SitsError as error:
        return error.diagnostics
    report.gradients += summarize(name, rows)
    return found


def _no_seed(tested: Instrumented) -> list[Diagnostic]:
    if tested.adjoint.seed is not None:
        return []
    message = "no binding where the gradient starts as 1: one loss scale was checked, not three"
    return [Diagnostic.warning("gradient-seed", message, function=tested.adjoint.name + SUFFIX)]


def _failures(tested: Instrumented, rows: Sequence[GradientRow]) -> list[Diagnostic]:
    """An error per array that fails somewhere, with its worst row."""
    failed: dict[tuple[str, str], list[GradientRow]] = {}
    for row in rows:
        if row.status == "fail":
            failed.setdefault((row.name, row.operator), []).append(row)
    return [_failure(tested, group) for group in failed.values()]


def _failure(tested: Instrumented, group: Sequence[GradientRow]) -> Diagnostic:
    worst = max(group, key=lambda row: (row.relative_l2, row.zero_mismatches))
    is_value = worst.operator.startswith("value of")
    what = f"`{worst.name}` ({worst.operator})"
    message = (
        f"{what if is_value else 'the gradient of ' + what} is not that of the float64 reference: "
        f"relative L2 {worst.relative_l2:.1e} (limit {worst.limit:g}), cosine {worst.cosine:.6f}, "
        f"zero in one only at {worst.zero_mismatches} of {worst.elements} elements, in "
        f"{worst.vector}, loss scale {worst.loss_scale:g}"
    )
    return Diagnostic.error(
        "value-wrong" if is_value else "gradient-wrong",
        message,
        function=tested.adjoint.name
        + (SUFFIX if "adjoint" in worst.operator or not is_value else ""),
        binding=worst.name,
        help="FixQuantizeGradient or sits_tvm.differentiate() make right gradients; if the rule is "
        "yours, compare it with the derivative of its op",
    )
