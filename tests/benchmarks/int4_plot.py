"""The rows of `bench_int4` as bars of GFLOP/s, with the limits that bound them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

REGIMES = {"one row": (1, 1), "few rows": (2, 32), "many rows": (33, 1 << 30)}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    kernels = [row for row in rows if "us" in row]
    panels = {
        title: [row for row in kernels if low <= row["m"] <= high]
        for title, (low, high) in REGIMES.items()
    }
    panels = {title: found for title, found in panels.items() if found}
    names = list(dict.fromkeys(row["kernel"] for row in kernels))
    figure = Figure(figsize=(11, 4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for ax, (title, found) in zip(axes, panels.items(), strict=True):
        _bars(ax, found, names)
        ax.set(title=title, ylabel="GFLOP/s, bound in black")
    figure.savefig(path)


def _bars(ax: Any, rows: list[dict[str, Any]], kernels: list[str]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    width = 0.8 / len(kernels)
    for i, kernel in enumerate(kernels):
        bars = {row["case"]: row["GFLOP/s"] for row in rows if row["kernel"] == kernel}
        at = [cases.index(case) + (i - len(kernels) / 2 + 0.5) * width for case in bars]
        ax.bar(at, list(bars.values()), width, label=kernel)
        limits = {row["case"]: _limit(row) for row in rows if row["kernel"] == kernel}
        for x, limit in zip(at, limits.values(), strict=True):
            ax.hlines(limit, x - width / 2, x + width / 2, "black")
    ax.set_xticks(np.arange(len(cases)), [textwrap.fill(case, 14) for case in cases])
    ax.legend(ncols=len(kernels), loc="lower center", bbox_to_anchor=(0.5, 1.08))


def _limit(row: dict[str, Any]) -> float:
    """GFLOP/s of a kernel that reaches the bound that `row` is nearest to; NaN without one."""
    share = max(row.get("of read", 0), row.get("of peak", 0))
    return row["GFLOP/s"] / share if share else float("nan")
