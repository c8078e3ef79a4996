"""The figure of an `AttentionRedundancy`. Imports matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .result import AttentionRedundancy


def plot(result: AttentionRedundancy) -> Any:
    """Four panels over the attentions of a function."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for panel, axis in zip((_ranks, _importance, _similarity, _mass), axes.flat, strict=True):
        panel(result, axis)
        for one in (axis.xaxis, axis.yaxis):
            if one.get_label_text() in ("attention", "head"):
                one.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.suptitle(f"{result.function}: redundancy of attention; nothing was changed")
    return figure


def _ranks(result: AttentionRedundancy, axis: Any) -> None:
    for name in "qkvo":
        found = [(i, r) for i, row in enumerate(result.rows) for r in row.ranks if r.name == name]
        axis.plot(
            [i for i, _ in found], [r.rank_99 / r.break_even for _, r in found], "o-", label=name
        )
    axis.axhline(1.0, color="gray", linestyle=":")
    axis.set(title="rank of 99 % energy / break-even", xlabel="attention")
    axis.legend()


def _importance(result: AttentionRedundancy, axis: Any) -> None:
    measured = [row.measured for row in result.rows if row.measured is not None]
    axis.set(title="importance of heads (share of the residual)", xlabel="head", ylabel="attention")
    if not measured:
        return
    table = np.full((len(measured), max(len(m.importance) for m in measured)), np.nan)
    for i, m in enumerate(measured):
        table[i, : len(m.importance)] = m.importance
    axis.figure.colorbar(axis.imshow(table, aspect="auto"), ax=axis)


def _similarity(result: AttentionRedundancy, axis: Any) -> None:
    measured = [(i, row.measured) for i, row in enumerate(result.rows) if row.measured is not None]
    for name in ("map_similarity", "contribution_similarity"):
        values = [abs(getattr(m, name).cosine) for _, m in measured]
        axis.plot([i for i, _ in measured], values, "o-", label=name.replace("_", " "))
    axis.set(title="most similar pair of heads, |cosine|", xlabel="attention", ylim=(0, 1.05))
    axis.legend()


def _mass(result: AttentionRedundancy, axis: Any) -> None:
    for row in result.rows:
        if row.measured is not None:
            kept = row.measured.kept_keys
            axis.semilogx(list(kept), list(kept.values()), "o-", label=row.binding)
    axis.set(title="visible keys that hold 1 - ε of the mass", xlabel="ε", ylim=(0, 1.05))
