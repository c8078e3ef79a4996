"""`Report`: what a build did, and what it left alone and why."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .diagnostics import Diagnostic


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
class AttentionSite:
    """A block of attention: recognised, or the condition that failed."""

    function: str
    binding: str
    recognised: bool
    reason: str
    attrs: dict[str, Any]


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

    `ranked` tells where its schedule comes from: "default" (our rule or dlight's) or "fallback"
    (no rule of its own). Shared memory is in bytes, registers and spills (bytes) per thread.
    `sass` and `loop_sass` (main loop only) count instructions by full opcode and by class.
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


@dataclass(repr=False)
class Report:
    """What was rewritten, skipped and scheduled. Prints as tables; shows as HTML in notebooks."""

    target: str = ""
    quantized: list[QuantizedWeight] = field(default_factory=list)
    skipped: list[SkippedWeight] = field(default_factory=list)
    attention: list[AttentionSite] = field(default_factory=list)
    quantize_sites: list[QuantizeSite] = field(default_factory=list)
    gradients: list[GradientSummary] = field(default_factory=list)
    passes: list[PassRun] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        """The report as JSON; `from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
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
        for title, header, rows in self._tables():
            parts.append(f"{title}\n{render_table(header, rows)}")
        parts += [str(diagnostic) for diagnostic in self._problems()]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        counts = [f"{len(getattr(self, name))} {name}" for name in _ROWS if getattr(self, name)]
        return f"<Report: {', '.join(counts) or 'empty'}>"

    def _repr_html_(self) -> str:
        """Tables that fold; those of kernels and passes are closed."""
        parts = [f"<p>target: {html.escape(self.target)}</p>"] if self.target else []
        for title, header, rows in self._tables():
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in rows
            )
            state = "" if title.startswith(("kernels", "passes")) else " open"
            parts.append(
                f"<details{state}><summary>{html.escape(title)}</summary>"
                f"<table><tr>{head}</tr>{body}</table></details>"
            )
        parts += [f"<pre>{html.escape(str(d))}</pre>" for d in self._problems()]
        return "\n".join(parts)

    def _problems(self) -> list[Diagnostic]:
        """Notes repeat what the tables say."""
        return [diagnostic for diagnostic in self.diagnostics if diagnostic.severity != "note"]

    def _tables(self) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        if self.quantized:
            packed = sum(w.packed_bytes for w in self.quantized)
            full = sum(w.float_bytes for w in self.quantized)
            yield (
                f"INT4 weights: {len(self.quantized)}, {packed:,} bytes where float took {full:,}",
                ["function", "name", "shape", "spec", "bytes"],
                [
                    [w.function, w.name, str(w.shape), w.spec, f"{w.packed_bytes:,}"]
                    for w in self.quantized
                ],
            )
        if self.skipped:
            yield (
                f"left in float: {len(self.skipped)}",
                ["function", "binding", "name", "reason"],
                [[s.function, s.binding, s.name, s.reason] for s in self.skipped],
            )
        if self.attention:
            yield (
                f"attention: {sum(a.recognised for a in self.attention)} of "
                f"{len(self.attention)} recognised",
                ["function", "binding", "recognised", "reason", "attrs"],
                [
                    [
                        a.function,
                        a.binding,
                        "yes" if a.recognised else "no",
                        a.reason,
                        _pairs(a.attrs),
                    ]
                    for a in self.attention
                ],
            )
        if self.quantize_sites:
            yield (
                f"quantization: {sum(s.fixed for s in self.quantize_sites)} of "
                f"{len(self.quantize_sites)} with its gradient",
                ["function", "binding", "form", "fixed", "reason"],
                [
                    [s.function, s.binding, s.form, "yes" if s.fixed else "no", s.reason]
                    for s in self.quantize_sites
                ],
            )
        if self.gradients:
            yield "gradients against their float64 reference", *gradient_table(self.gradients)
        if self.kernels:
            rows = [_kernel_row(kernel) for kernel in self.kernels]
            used = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
            yield (
                f"kernels: {len(self.kernels)}",
                [_KERNEL_HEADER[i] for i in used],
                [[row[i] for i in used] for row in rows],
            )
        if self.passes:
            yield (
                f"passes: {len(self.passes)}, {sum(p.seconds for p in self.passes):.1f} s",
                ["name", "changed", "seconds"],
                [[p.name, "yes" if p.changed else "", f"{p.seconds:.2f}"] for p in self.passes],
            )


_ROWS: dict[str, type] = {
    "quantized": QuantizedWeight,
    "skipped": SkippedWeight,
    "attention": AttentionSite,
    "quantize_sites": QuantizeSite,
    "gradients": GradientSummary,
    "passes": PassRun,
    "kernels": Kernel,
    "diagnostics": Diagnostic,
}
_SHOWN_SASS = ("HMMA", "IMMA", "HGMMA", "IGMMA", "FFMA", "LOP3", "CALL", "LDG.128", "LDG.narrow")
_KERNEL_HEADER = [f.name for f in fields(Kernel) if f.name != "loop_sass"]


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain-text table, columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def gradient_table(rows: Sequence[GradientSummary]) -> tuple[list[str], list[list[str]]]:
    """Header and cells."""
    formats = {
        "function": "{}",
        "operator": "{}",
        "count": "{}",
        "not_informative": "{}",
        "pass_rate": "{:.1%}",
        "relative_l2": "{:.1e}",
        "cosine": "{:.8f}",
        "max_difference": "{:.1e}",
        "zero_mismatches": "{}",
        "clipped": "{:.1%}",
    }
    cells = [
        [
            "" if (v := getattr(row, name)) is None else form.format(v)
            for name, form in formats.items()
        ]
        for row in rows
    ]
    return [name.replace("_", " ") for name in formats], cells


def _kernel_row(kernel: Kernel) -> list[str]:
    def text(value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, tuple):
            return "x".join(value)
        if isinstance(value, dict):  # the classes; full opcodes are in to_json()
            return _pairs({key: value[key] for key in _SHOWN_SASS if value.get(key)})
        return str(value)

    return [text(getattr(kernel, name)) for name in _KERNEL_HEADER]


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
