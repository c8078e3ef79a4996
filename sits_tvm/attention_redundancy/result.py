"""The result of `check_attention_redundancy`: tables, JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..optional_packages import require
from ..report_tables import render_table
from .rows import AttentionRow, ProjectionRank, Similarity

IMPORTANT = 0.02
SIMILAR = 0.92
_HEAD_COLUMNS = ["binding", "heads", "weights", "maps", "contributions", "least", "median"]


@dataclass
class AttentionRedundancy:
    """What `check_attention_redundancy` measured. Prints as tables.

    Attributes
    ----------
    function : str
    rows : list of AttentionRow
        One per attention, in the order of the function.
    """

    function: str
    rows: list[AttentionRow] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        parts = [f"{self.function}, attention: {len(self.rows)}; nothing was changed"]
        for title, header, rows in self._tables():
            if rows:
                parts.append(f"{title}\n{render_table(header, rows)}")
        return "\n\n".join([*parts, "\n".join(self._could_win())])

    def __repr__(self) -> str:
        return f"<AttentionRedundancy of {self.function}, attention: {len(self.rows)}>"

    def _tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        ranks = [(row, rank) for row in self.rows for rank in row.ranks]
        yield (
            "rank of projections (float16 tolerance; of 99 % and 95 % of the energy)",
            ["binding", "name", "shape", "rank", "99 %", "95 %", "saves below"],
            [
                [row.binding, r.name, f"{r.shape[0]}×{r.shape[1]}", *_rank_cells(r)]
                for row, r in ranks
            ],
        )
        yield (
            "heads (largest |cosine| of a pair; |what a head adds| / |residual|, least and median)",
            [*_HEAD_COLUMNS, "output/residual"],
            [_head_cells(row) for row in self.rows if row.weight_similarity is not None],
        )
        measured = [(row, row.measured) for row in self.rows if row.measured is not None]
        yield (
            "mass below a threshold (and cells kept); visible keys that hold 1 - ε of the mass",
            ["binding", *_mass_header(measured[0][1])] if measured else [],
            [[row.binding, *_mass_cells(m)] for row, m in measured],
        )
        yield (
            "bytes of keys and values per token",
            ["binding", *(self.rows[0].kv_bytes if self.rows else ())],
            [[row.binding, *(f"{b:g}" for b in row.kv_bytes.values())] for row in self.rows],
        )

    def _could_win(self) -> Iterator[str]:
        """What an approximate pass could win; all of it costs quality that nobody measured here."""
        yield "what an approximate pass could win (not done; each changes values):"
        low = [r for row in self.rows for r in row.ranks if r.rank_99 < r.break_even]
        ranks = [r for row in self.rows for r in row.ranks]
        if ranks:
            found = f"{len(low)} of {len(ranks)} projections"
            yield f"  factors of 99 % of the energy save work in {found}"
        measured = [row.measured for row in self.rows if row.measured is not None]
        if measured:
            weak = sum(i < IMPORTANT for m in measured for i in m.importance)
            heads = sum(len(m.importance) for m in measured)
            yield f"  {weak} of {heads} heads move the residual by less than {IMPORTANT:.0%}"
            alike = sum(abs(m.map_similarity.cosine) > SIMILAR for m in measured)
            same = sum(abs(m.contribution_similarity.cosine) > SIMILAR for m in measured)
            yield (
                f"  {alike} of {len(measured)} attentions have heads of maps with "
                f"cosine > {SIMILAR}, {same} of contributions"
            )
        total = {k: sum(row.kv_bytes[k] for row in self.rows) for k in _formats(self.rows)}
        for name, size in list(total.items())[1:]:
            yield f"  {name} keys and values: {size:g} bytes per token for {total['float16']:g}"
        yield from (f"  `{row.binding}`: {row.reason}" for row in self.rows if row.reason)

    def plot(self) -> Any:
        """A matplotlib figure: ranks, importance of heads, similarity, kept keys."""
        require("matplotlib", "AttentionRedundancy.plot", "tutorials")
        from .plot import plot

        return plot(self)


def _rank_cells(rank: ProjectionRank) -> list[str]:
    return [str(rank.rank), str(rank.rank_99), str(rank.rank_95), f"{rank.break_even:.0f}"]


def _formats(rows: list[AttentionRow]) -> list[str]:
    return list(rows[0].kv_bytes) if rows else []


def _head_cells(row: AttentionRow) -> list[str]:
    m = row.measured
    heads = str(row.heads) if row.heads == row.kv_heads else f"{row.heads}/{row.kv_heads}"
    cells = [row.binding, heads, _cosine(row.weight_similarity)]
    if m is None:
        return [*cells, "", "", "", "", ""]
    ordered = sorted(m.importance)
    ratio = f"{m.norm_ratio['50%']:.2f}" if m.norm_ratio else ""
    cells += [_cosine(m.map_similarity), _cosine(m.contribution_similarity)]
    return [*cells, f"{ordered[0]:.1%}", f"{ordered[len(ordered) // 2]:.1%}", ratio]


def _cosine(similarity: Similarity | None) -> str:
    if similarity is None or similarity.pair is None:
        return ""
    return f"{similarity.cosine:.3f} ({similarity.pair[0]}, {similarity.pair[1]})"


def _mass_header(measured: Any) -> list[str]:
    return [f"< {t:g}" for t in measured.dropped] + [f"ε = {e:g}" for e in measured.kept_keys]


def _mass_cells(measured: Any) -> list[str]:
    dropped = [f"{mass:.2%} ({cells:.0%})" for mass, cells in measured.dropped.values()]
    return dropped + [f"{share:.0%}" for share in measured.kept_keys.values()]
