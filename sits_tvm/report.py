"""`Report`: what a build did, and what it left alone and why."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from .diagnostics import Diagnostic
from .report_tables import html_table, render_table, report_tables


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is stored in INT4. Bytes count codes, scales and zero points."""

    function: str
    binding: str
    name: str
    spec: str
    shape: tuple[int, ...]
    float_bytes: int
    packed_bytes: int


@dataclass(frozen=True)
class SkippedWeight:
    """A matrix product or embedding that keeps its float weight."""

    function: str
    binding: str
    name: str
    reason: str


@dataclass(frozen=True)
class StackedWeights:
    """Products of one input that are one call, their weights stacked, or why one of them is not.

    `binding` is the first of the products.
    """

    function: str
    binding: str
    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class AttentionSite:
    """A block of attention: recognised, or the condition that failed."""

    function: str
    binding: str
    recognised: bool
    reason: str
    attrs: dict[str, Any]


@dataclass(frozen=True)
class AttentionRewrite:
    """A rule that looked for redundancy in one attention: what it proved, from what, or why not."""

    function: str
    binding: str
    rule: str
    changed: bool
    reason: str


@dataclass(frozen=True)
class LoweredAttention:
    """An attention in the compiled module: by the fused `kernel`, or in plain ops and why."""

    function: str
    binding: str
    kernel: str
    reason: str


@dataclass(frozen=True)
class RewriteCheck:
    """What `Config.verify` measured where a pass computes `binding` in another way.

    `difference` is the largest of the new value to the old one, in the draw that came nearest to
    its `limit`; `reason` tells why there were no draws; `pass_name` names the pass.
    """

    function: str
    binding: str
    draws: int
    difference: float
    limit: float
    draw: str
    reason: str
    pass_name: str = ""


@dataclass(frozen=True)
class QuantizeSite:
    """Quantization in the graph: whether it has its gradient (`fixed`), or why not.

    `form` lists the ops it is spelled with, in order, and the granularity.
    """

    function: str
    binding: str
    form: str
    fixed: bool
    reason: str


@dataclass(frozen=True)
class GradientSummary:
    """Gradients of one operator type against their float64 reference, or values of one.

    `pass_rate` and `cosine` (the smallest) are None where nothing was informative: gradients that
    are zero, or below the noise of their dtype. `relative_l2`, `max_difference` and `clipped` (the
    share of elements outside the range of the codes) are the largest.
    """

    function: str
    operator: str
    count: int
    not_informative: int
    pass_rate: float | None
    relative_l2: float
    cosine: float | None
    max_difference: float
    zero_mismatches: int
    clipped: float


@dataclass(frozen=True)
class PassRun:
    """A pass of the pipeline, with wall seconds."""

    name: str
    changed: bool
    seconds: float


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. The fields after `ranked` are read back from device code (CUDA only).

    `ranked` tells where its schedule comes from: "tuned" (a record of a tuning database, for the
    numbers of rows in `tuned_rows`, by what `tuned_by` names: "measured" times, or "static"
    estimates; for others the default), "default" (our rule or dlight's) or
    "fallback" (no rule of its own). Shared memory is in bytes, registers and spills (bytes) per
    thread. `sass` and `loop_sass` (main loop only) count instructions by full opcode and by class.
    `condition` is what the host asks last before it starts the kernel: of a product that has
    kernels for some numbers of rows each, these ("b * s <= 16"). `reason` tells why a product with
    an INT4 weight has a kernel of TVM's.
    """

    name: str
    family: str
    ranked: str
    grid: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    registers: int | None = None
    spills: int | None = None
    static_smem: int | None = None
    dynamic_smem: int | str | None = None
    sass: dict[str, int] = field(default_factory=dict)
    loop_sass: dict[str, int] = field(default_factory=dict)
    tuned_rows: tuple[str, ...] = ()
    condition: str = ""
    tuned_by: tuple[str, ...] = ()
    reason: str = ""


@dataclass(repr=False)
class Report:
    """What was rewritten, skipped and scheduled. Prints as tables; shows as HTML in notebooks.

    Attributes
    ----------
    target : str
        As TVM writes it, with what was filled in.
    quantized : list of QuantizedWeight
    skipped : list of SkippedWeight
    stacked : list of StackedWeights
    attention : list of AttentionSite
    attention_rewrites : list of AttentionRewrite
    rewrite_checks : list of RewriteCheck
        With `Config.verify`.
    lowered_attention : list of LoweredAttention
    quantize_sites : list of QuantizeSite
    gradients : list of GradientSummary
        With `Config.gradient_gate`.
    passes : list of PassRun
    kernels : list of Kernel
    diagnostics : list of Diagnostic
        Warnings and notes of all steps; ``python -m sits_tvm check`` adds errors. Notes are not
        printed: they repeat what the tables say.
    """

    target: str = ""
    quantized: list[QuantizedWeight] = field(default_factory=list)
    skipped: list[SkippedWeight] = field(default_factory=list)
    stacked: list[StackedWeights] = field(default_factory=list)
    attention: list[AttentionSite] = field(default_factory=list)
    attention_rewrites: list[AttentionRewrite] = field(default_factory=list)
    rewrite_checks: list[RewriteCheck] = field(default_factory=list)
    lowered_attention: list[LoweredAttention] = field(default_factory=list)
    quantize_sites: list[QuantizeSite] = field(default_factory=list)
    gradients: list[GradientSummary] = field(default_factory=list)
    passes: list[PassRun] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, their rows as dicts."""
        return asdict(self)

    def to_json(self) -> str:
        """The report as JSON; `from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote."""
        values = json.loads(text)
        report = cls(target=values["target"])
        for name, row in _ROWS.items():
            rows = [
                row(**{k: _tuples(v) for k, v in entry.items()}) for entry in values.get(name, [])
            ]
            setattr(report, name, rows)
        return report

    def __str__(self) -> str:
        parts = [f"target: {self.target}"] if self.target else []
        for title, header, rows in report_tables(self):
            parts.append(f"{title}\n{render_table(header, rows)}")
        parts += [str(diagnostic) for diagnostic in self._problems()]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        counts = [f"{len(getattr(self, name))} {name}" for name in _ROWS if getattr(self, name)]
        return f"<Report: {', '.join(counts) or 'empty'}>"

    def _repr_html_(self) -> str:
        parts = [f"<p>target: {html.escape(self.target)}</p>"] if self.target else []
        parts += [html_table(*table) for table in report_tables(self)]
        parts += [f"<pre>{html.escape(str(d))}</pre>" for d in self._problems()]
        return "\n".join(parts)

    def _problems(self) -> list[Diagnostic]:
        """Notes repeat what the tables say."""
        return [diagnostic for diagnostic in self.diagnostics if diagnostic.severity != "note"]


_ROWS: dict[str, type] = {
    "quantized": QuantizedWeight,
    "skipped": SkippedWeight,
    "stacked": StackedWeights,
    "attention": AttentionSite,
    "attention_rewrites": AttentionRewrite,
    "rewrite_checks": RewriteCheck,
    "lowered_attention": LoweredAttention,
    "quantize_sites": QuantizeSite,
    "gradients": GradientSummary,
    "passes": PassRun,
    "kernels": Kernel,
    "diagnostics": Diagnostic,
}


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
