"""Which heads stay, from which are dead and which are equal: sets and counts, no weights.

Query heads of one key/value head share their keys and values, and every group has equally many, so
a head can only go with its whole group, or with one of every other group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeadFacts:
    """What is known of the heads of one attention.

    Attributes
    ----------
    dead : per query head, whether what it adds to the output is constant
    maps : per query head, equal for equal attention maps
    values : per key/value head, equal for equal values
    """

    dead: Sequence[bool]
    maps: Sequence[Hashable]
    values: Sequence[Hashable]


@dataclass
class Group:
    """A key/value head that stays. `heads` are the query heads whose map is kept, with all that
    share map and values with each, itself first."""

    index: int
    heads: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """One attention of the result. A class is groups with the same maps: the first one's are
    computed, for the values of all."""

    classes: list[list[Group]]

    @property
    def width(self) -> int:
        """Value heads side by side."""
        return len(self.classes[0])


def plan_heads(facts: HeadFacts, share_maps: bool) -> list[Part]:
    """The attentions to compute; one whose every group is as it was means that nothing changes.

    `share_maps`: compute equal maps once, for values side by side.
    """
    groups = _unequal_groups(facts)
    groups = [g for g in groups if g.heads] or [_unchanged(facts, 0)]
    ratio = max(len(group.heads) for group in groups)
    for group in groups:
        _fill(group, ratio, facts)
    by_maps: dict[Hashable, list[Group]] = {}
    for group in groups:
        group.heads.sort(key=lambda heads: (repr(facts.maps[heads[0]]), heads[0]))
        maps = tuple(facts.maps[heads[0]] for heads in group.heads)
        by_maps.setdefault(maps if share_maps else group.index, []).append(group)
    for alike in by_maps.values():
        if len(alike) == 1:
            alike[0].heads.sort()
    widths = sorted({len(alike) for alike in by_maps.values()})
    return [Part([c for c in by_maps.values() if len(c) == width]) for width in widths]


def is_unchanged(parts: Sequence[Part], facts: HeadFacts) -> bool:
    groups = [group for part in parts for alike in part.classes for group in alike]
    kept = sum(len(group.heads) for group in groups)
    return len(parts) == 1 and parts[0].width == 1 and kept == len(facts.maps)


def heads_of(group: int, facts: HeadFacts) -> range:
    ratio = len(facts.maps) // len(facts.values)
    return range(group * ratio, (group + 1) * ratio)


def _unchanged(facts: HeadFacts, group: int) -> Group:
    return Group(group, [[head] for head in heads_of(group, facts)])


def _unequal_groups(facts: HeadFacts) -> list[Group]:
    """Groups without dead heads, where equal heads are one; none that another contains."""
    found = []
    for index in range(len(facts.values)):
        alike: dict[Hashable, list[int]] = {}
        for head in heads_of(index, facts):
            if not facts.dead[head]:
                alike.setdefault(facts.maps[head], []).append(head)
        found.append(alike)
    for small in range(len(found)):
        for large in range(len(found)):
            equal = facts.values[small] == facts.values[large]
            if (
                small != large
                and equal
                and found[small]
                and found[small].keys() <= found[large].keys()
            ):
                for key, heads in found[small].items():
                    found[large][key] += heads
                found[small] = {}
    return [Group(index, list(alike.values())) for index, alike in enumerate(found)]


def _fill(group: Group, ratio: int, facts: HeadFacts) -> None:
    """Keep more heads than needed, so that every group has `ratio`."""
    own = heads_of(group.index, facts)
    while len(group.heads) < ratio:
        kept = [heads[0] for heads in group.heads]
        spare = next(head for head in own if head not in kept)
        for heads in group.heads:
            if spare in heads:
                heads.remove(spare)
        group.heads.append([spare])
