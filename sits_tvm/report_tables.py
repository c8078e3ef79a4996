"""Reports as tables, in plain text and in HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import GradientSummary, Report

Table = tuple[str, list[str], list[list[str]]]
WIDTH = 140
_SHOWN_SASS = ("HMMA", "IMMA", "HGMMA", "IGMMA", "FFMA", "LOP3", "CALL", "LDG.128", "LDG.narrow")
_ATTENTION_DEFAULTS: dict[str, Any] = {
    "causal": None,
    "window": 0,
    "softcap": 0.0,
    "empty_row": "nan",
    "scores_dtype": "float32",
    "softmax_dtype": "float32",
    "bias": None,
}


def report_tables(report: Report) -> Iterator[Table]:
    """Title, header and cells of each kind of row that a report has."""
    if report.quantized:
        packed = sum(w.packed_bytes for w in report.quantized)
        full = sum(w.float_bytes for w in report.quantized)
        yield (
            f"INT4 weights: {len(report.quantized)}, {packed:,} bytes where float took {full:,}",
            ["function", "name", "shape", "spec", "bytes"],
            [
                [w.function, w.name, str(w.shape), w.spec, f"{w.packed_bytes:,}"]
                for w in report.quantized
            ],
        )
    if report.skipped:
        yield (
            f"left in float: {len(report.skipped)}",
            ["function", "binding", "name", "reason"],
            [[s.function, s.binding, s.name, s.reason] for s in report.skipped],
        )
    if report.stacked:
        calls = sum(not row.reason for row in report.stacked)
        yield (
            f"products of one input: {calls} calls with stacked weights",
            ["function", "binding", "names", "left alone"],
            [[s.function, s.binding, ", ".join(s.names), s.reason] for s in report.stacked],
        )
    if report.attention:
        yield (
            f"attention: {sum(a.recognised for a in report.attention)} of "
            f"{len(report.attention)} recognised",
            ["function", "binding", "recognised", "reason", "attrs"],
            [
                [
                    a.function,
                    a.binding,
                    "yes" if a.recognised else "no",
                    a.reason,
                    _attention_cell(a.attrs),
                ]
                for a in report.attention
            ],
        )
    if report.attention_rewrites:
        changed = sum(r.changed for r in report.attention_rewrites)
        yield (
            f"redundancy: {changed} rewritten, {len(report.attention_rewrites) - changed} left",
            ["function", "binding", "rule", "changed", "reason"],
            [
                [r.function, r.binding, r.rule, "yes" if r.changed else "", r.reason]
                for r in report.attention_rewrites
            ],
        )
    if report.rewrite_checks:
        within = sum(r.difference <= r.limit for r in report.rewrite_checks if r.draws)
        yield (
            f"rewrites compared: {within} of {len(report.rewrite_checks)} equal up to rounding",
            ["function", "binding", "pass", "draws", "difference", "limit", "in", "reason"],
            [
                [
                    *(r.function, r.binding, r.pass_name, str(r.draws)),
                    *(f"{r.difference:.1e}", f"{r.limit:.1e}", r.draw, r.reason),
                ]
                for r in report.rewrite_checks
            ],
        )
    if report.lowered_attention:
        lowered = report.lowered_attention
        yield (
            f"attention lowered: {sum(bool(r.kernel) for r in lowered)} of {len(lowered)} fused",
            ["function", "binding", "kernel", "reason"],
            [[r.function, r.binding, r.kernel or "plain ops", r.reason] for r in lowered],
        )
    if report.quantize_sites:
        yield (
            f"quantization: {sum(s.fixed for s in report.quantize_sites)} of "
            f"{len(report.quantize_sites)} with its gradient",
            ["function", "binding", "form", "fixed", "reason"],
            [
                [s.function, s.binding, s.form, "yes" if s.fixed else "no", s.reason]
                for s in report.quantize_sites
            ],
        )
    if report.gradients:
        yield "gradients against their float64 reference", *gradient_table(report.gradients)
    if report.kernels:
        header = [f.name for f in fields(report.kernels[0]) if f.name != "loop_sass"]
        rows = [[_kernel_cell(name, getattr(k, name)) for name in header] for k in report.kernels]
        used = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
        yield (
            f"kernels: {len(report.kernels)}",
            [header[i] for i in used],
            [[row[i] for i in used] for row in rows],
        )
    if report.passes:
        yield (
            f"passes: {len(report.passes)}, {sum(p.seconds for p in report.passes):.1f} s",
            ["name", "changed", "seconds"],
            [[p.name, "yes" if p.changed else "", f"{p.seconds:.2f}"] for p in report.passes],
        )


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that folds; those of kernels and passes are closed."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    state = "" if title.startswith(("kernels", "passes")) else " open"
    return (
        f"<details{state}><summary>{html.escape(title)}</summary>"
        f"<table><tr>{head}</tr>{body}</table></details>"
    )


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain-text table. Cells of the widest columns are wrapped to keep it within `WIDTH`."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(text for line in lines for text in _wrapped(line, widths))


def _wrapped(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    pairs = zip(cells, widths, strict=True)
    wrapped = [textwrap.wrap(cell, width) if len(cell) > width else [cell] for cell, width in pairs]
    for line in zip_longest(*wrapped, fillvalue=""):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()


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


def _kernel_cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ("x" if name in ("grid", "block") else ", ").join(value)
    if isinstance(value, dict):  # the classes; full opcodes are in to_json()
        return _pairs({key: value[key] for key in _SHOWN_SASS if value.get(key)})
    return str(value)


def _attention_cell(attrs: dict[str, Any]) -> str:
    """The attributes that are not the usual ones; all of them are in to_json()."""
    shown = {k: v for k, v in attrs.items() if k not in _ATTENTION_DEFAULTS}
    shown |= {k: attrs[k] for k, v in _ATTENTION_DEFAULTS.items() if attrs.get(k, v) != v}
    return _pairs({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in shown.items()})


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
