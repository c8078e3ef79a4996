"""What was proved of the heads of an attention, in words."""

from __future__ import annotations

from collections.abc import Sequence

from .attention_projections import AttentionWeights
from .facts import FoundHeads, HeadWeights, has_one_mask, rounding
from .plan import Part
from .rewrite import SitePlan


def heads_reason(
    site: AttentionWeights, weights: HeadWeights, found: FoundHeads, plan: SitePlan | None
) -> str:
    facts = _facts(site, found, plan)
    heads, groups = site.num_heads, site.num_kv_heads
    if plan is None and not facts:
        note = "" if has_one_mask(site.call) else ", whose biases differ"
        return f"nothing pruned: no zero, constant or equal one among {heads} heads{note}"
    if plan is None:
        return (
            f"nothing pruned: {'; '.join(facts)}; {heads} heads read {groups} keys and values, "
            "so a head goes with its whole group, or with one of every other group"
        )
    return "; ".join([*_result(site, plan.parts), *facts, _residual(plan, weights)])


def _facts(site: AttentionWeights, found: FoundHeads, plan: SitePlan | None) -> list[str]:
    facts, ratio = [], site.num_heads // site.num_kv_heads
    if found.zero:
        facts.append(f"columns of the output projection of heads {_list(found.zero)} are all zero")
    constant = [g for g, value in enumerate(found.constant) if value is not None]
    if constant:
        folded = plan is not None and plan.constant is not None
        facts.append(
            f"weights of value heads {_list(constant)} are all zero: softmax rows sum to 1 (no row "
            f"is empty), each result is the bias{', and that went into the output' * folded}"
        )
    if found.needed:
        facts.append(
            f"heads {_list(found.needed)} add nothing but NaN, which their weights or rows that "
            "see no key may hold, and stay"
        )
    maps = [found.facts.maps[h] for h in range(site.num_heads)]
    for heads in _repeated(maps):
        facts.append(f"maps of heads {_list(heads)} are equal, entry by entry in float64")
    for keys in _repeated([form.key for form in found.forms]):
        facts.append(f"values of key/value heads {_list(keys)} are equal, entry by entry")
    return (
        [*facts, f"{ratio} query heads share each key/value head"] if facts and ratio > 1 else facts
    )


def _result(site: AttentionWeights, parts: Sequence[Part]) -> list[str]:
    groups = [c for part in parts for c in part.classes]
    kept = sum(len(c[0].heads) for c in groups)
    width = f"{', '.join(str(part.width) for part in parts)} value heads side by side"
    lines = [f"{kept} of {site.num_heads} maps kept, {len(groups)} of {site.num_kv_heads} keys"]
    if any(part.width > 1 for part in parts):
        d = int(site.call.args[0].ty.shape[3])
        saved = site.num_heads - kept
        extra = "one more attention and slices of q, k, v" if len(parts) > 1 else "no more kernel"
        lines.append(
            f"in {len(parts)} attention of {width}: saves {saved}·{d} multiply-adds per query and "
            f"visible key and {saved} query projections, at {extra} and one copy of the values"
        )
    return lines


def _residual(plan: SitePlan, weights: HeadWeights) -> str:
    error = max(rounding(rows, weights.o.dtype) for rows in plan.outputs)
    return f"rows of the output projection rounded by {error:.1e} ({weights.o.dtype})"


def _repeated(keys: Sequence) -> list[list[int]]:
    places: dict = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return [found for found in places.values() if len(found) > 1]


def _list(heads: Sequence[int]) -> str:
    return ", ".join(map(str, heads))
