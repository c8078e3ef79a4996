"""The figure of an `AttentionRedundancy`. Imports matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .result import AttentionRedundancy


def plot(result: AttentionRedundancy) -> Any:
    """Four panels over the attentions of a function; the first alone where no inputs were given."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    is_measured = any(row.measured is not None for row in result.rows)
    panels = (_ranks, _importance, _similarity, _mass) if is_measured else (_ranks,)
    side = 2 if is_measured else 1
    figure, axes = plt.subplots(
        side, side, figsize=(5 * side, 3.5 * side), layout="constrained", squeeze=False
    )
    for panel, axis in zip(panels, axes.flat, strict=True):
        panel(result, axis)
        for one in (axis.xaxis, axis.yaxis):
            if one.get_label_text() in ("attention", "head"):
                one.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.suptitle(f"{result.function}: redundancy of attention; nothing was changed")
    return figure


def _ranks(result: AttentionRedundancy, axis: Any) -> None:
    for shift, (name, marker) in enumerate(zip("qkvo", "os^D", strict=True)):
        found = [(i, r) for i, row in enumerate(result.rows) for r in row.ranks if r.name == name]
        at = [i + (shift - 1.5) / 10 for i, _ in found]  # beside each other: they may be equal
        shares = [r.rank_99 / r.break_even for _, r in found]
        axis.plot(at, shares, marker, label=name)
    axis.axhline(1.0, color="gray", linestyle=":")
    axis.set(title="rank of 99 % energy / break-even", xlabel="attention")
    axis.legend()


def _importance(result: AttentionRedundancy, axis: Any) -> None:
    measured = [row.measured for row in result.rows if row.measured is not None]
    title = "importance of heads: ‖what it adds‖ / ‖residual‖"
    axis.set(title=title, xlabel="head", ylabel="attention")
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
