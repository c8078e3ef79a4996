"""What a gradient check found: rows per array, a summary per operator type, diagnostics."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..diagnostics import Diagnostic
from ..report import GradientSummary
from ..report_tables import gradient_table, render_table


@dataclass(frozen=True)
class GradientRow:
    """One array on one vector at one loss scale, against its float64 reference.

    Attributes
    ----------
    name, operator : str
        The parameter, and the op that computes with it ("matmul", "scale of matmul"). A row whose
        operator starts with "value of" compares a result of the forward function, or what the
        adjoint returns beside the gradients ("value of adjoint output").
    vector : str
        "seed 0", "given", or "clip edges" and "ties", where elements lie on decisions.
    status : str
        "pass"; "fail"; "zero" (both are zero: nothing is learned); "noise" (not informative: the
        rounding of values to their dtype alone explains the difference).
    limit : float
        Of `relative_l2`.
    clipped : float
        Share of the elements of the quantized tensor outside the range of its codes.
    elements : int
    relative_l2, cosine, max_difference, zero_mismatches
        See `measures.Measure`.
    """

    name: str
    operator: str
    vector: str
    loss_scale: float
    status: str
    limit: float
    clipped: float
    elements: int
    relative_l2: float
    cosine: float
    max_difference: float
    zero_mismatches: int


@dataclass(frozen=True)
class FidelityRow:
    """The gradient of one weight at its INT4 values against the one at its float values.

    Attributes
    ----------
    relative_l2, cosine, max_difference
        Of g(Q(w)) against g(w).
    residual : float
        ‖g(Q(w)) - g(w) - H·(Q(w) - w)‖ / ‖g(Q(w)) - g(w)‖: what the first-order term leaves
        unexplained. H is the Hessian of the loss in all quantized weights together, at w.
    clipped : float
        Share of the elements of w outside the range of their codes.
    """

    name: str
    operator: str
    relative_l2: float
    cosine: float
    max_difference: float
    residual: float
    clipped: float


@dataclass
class GradientCheck:
    """The result of `check_gradient_conservation`. Prints as tables.

    Attributes
    ----------
    function : str
    rows : list of GradientRow
        The gate; empty if the static part found errors.
    fidelity : list of FidelityRow
        INT4 against float weights: a property of the model, which never fails.
    diagnostics : list of Diagnostic
    """

    function: str
    rows: list[GradientRow] = field(default_factory=list)
    fidelity: list[FidelityRow] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No error, and every gradient and value equals its reference."""
        return all(d.severity != "error" for d in self.diagnostics)

    def summary(self) -> list[GradientSummary]:
        """The rows by operator type."""
        return summarize(self.function, self.rows)

    def to_json(self) -> str:
        values = asdict(self)
        values["ok"], values["summary"] = self.ok, [asdict(row) for row in self.summary()]
        return json.dumps(_finite(values), indent=1)

    def __str__(self) -> str:
        verdict = "gradients conserved" if self.ok else "gradients NOT conserved"
        parts = [f"{self.function}: {verdict}"]
        if self.rows:
            limits = ", ".join(f"{limit:g}" for limit in sorted({r.limit for r in self.rows}))
            title = f"against the float64 reference, {len(self.rows)} comparisons, limit {limits}"
            parts.append(f"{title}\n{render_table(*gradient_table(self.summary()))}")
        if self.fidelity:
            title = f"INT4 against float weights, {len(self.fidelity)} weights"
            cells = [
                [form.format(getattr(row, k)) for k, form in _FIDELITY.items()]
                for row in self.fidelity
            ]
            parts.append(
                f"{title}\n{render_table([k.replace('_', ' ') for k in _FIDELITY], cells)}"
            )
        parts += [str(d) for d in self.diagnostics if d.severity != "note"]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return f"<GradientCheck of {self.function}: {'ok' if self.ok else 'failed'}>"


_FIDELITY = {
    "name": "{}",
    "operator": "{}",
    "relative_l2": "{:.3f}",
    "cosine": "{:.4f}",
    "max_difference": "{:.1e}",
    "residual": "{:.3f}",
    "clipped": "{:.2%}",
}


def summarize(function: str, rows: Sequence[GradientRow]) -> list[GradientSummary]:
    """One line per operator type, with the worst figures of its informative rows."""
    groups: dict[str, list[GradientRow]] = {}
    for row in rows:
        groups.setdefault(row.operator, []).append(row)
    return [_summary(function, operator, group) for operator, group in groups.items()]


def _summary(function: str, operator: str, rows: Sequence[GradientRow]) -> GradientSummary:
    told = [row for row in rows if row.status in ("pass", "fail")]
    passed = sum(row.status == "pass" for row in told)
    cosines = [row.cosine for row in told if not math.isnan(row.cosine)]
    return GradientSummary(
        function,
        operator,
        count=len(rows),
        not_informative=len(rows) - len(told),
        pass_rate=passed / len(told) if told else None,
        relative_l2=max((row.relative_l2 for row in told), default=0.0),
        cosine=min(cosines, default=None),
        max_difference=max((row.max_difference for row in told), default=0.0),
        zero_mismatches=sum(row.zero_mismatches for row in told),
        clipped=max(row.clipped for row in rows),
    )


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: those become text."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
