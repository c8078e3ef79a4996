"""Which guards behind a softmax make 0 of the rows that show no key, and of no others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import relax, tirx

from .elements import Element, Points
from .graph import NearMiss
from .scores import Mask
from .weights import Guard


class GuardReader:
    """Guards of one block.

    Parameters
    ----------
    scores : Element
        The input of the softmax, at its axes.
    axis : tirx.Var
        The axis of the softmax.
    """

    def __init__(
        self, points: Points, masks: Sequence[Mask], scores: Element, axis: tirx.Var
    ) -> None:
        self.points, self.graph, self.masks = points, points.graph, masks
        self.scores, self.axis = scores, axis

    def zero_rows(self, guards: Sequence[Guard]) -> str:
        """Which rows become 0: "none", "infinite" (those of nothing but -inf) or "hidden".

        Raises
        ------
        NearMiss
            For a guard that is not proved to test just this.
        """
        found = [self._rows_of(guard) for guard in guards]
        if "hidden" in found:
            return "hidden"
        return "infinite" if found else "none"

    def _rows_of(self, guard: Guard) -> str:
        if guard.condition is None:
            return "infinite"  # a row of finite scores is never NaN
        row, value = self._down(guard.condition, guard.zero_where)
        name, call = self.graph.call(row.tensor)
        score = self._reduced(row, call) if name == ("min" if value else "max") else None
        if score is not None:
            score, value = self._down(score, value)
            if self._is_hidden_score(score, value):
                return "infinite"
            if self._is_mask(score, value):
                return "hidden"
        message = "weights become 0 under a condition that is not proved to mean: no key is visible"
        raise NearMiss("guard-not-proved", message, guard.binding)

    def _down(self, element: Element, value: bool) -> tuple[Element, bool]:
        """Through views, casts between truth values, and negations."""
        while True:
            below = self.points.step(element)
            name, call = self.graph.call(element.tensor)
            if below is None and name in ("logical_not", "astype"):
                below = Element(call.args[0], element.indices)
                value = value != (name == "logical_not")
            if below is None:
                return element, value
            element = below

    def _reduced(self, row: Element, call: relax.Call) -> Element | None:
        """What the reduction goes over, at `axis`."""
        axes = [int(i) % call.args[0].ty.ndim for i in call.attrs.axis or ()]
        if len(axes) != 1:
            return None
        indices = list(row.indices)
        if call.attrs.keepdims:
            del indices[axes[0]]
        indices.insert(axes[0], self.axis)
        return Element(call.args[0], tuple(indices))

    def _is_hidden_score(self, score: Element, value: bool) -> bool:
        """A comparison of the softmax's input with -inf."""
        name, call = self.graph.call(score.tensor)
        if name != ("equal" if value else "not_equal"):
            return False
        compared = Element(call.args[0], score.indices)
        return self.graph.fill(call.args[1]) == -math.inf and self._is_same(compared, self.scores)

    def _is_mask(self, score: Element, value: bool) -> bool:
        """The condition of the only mask."""
        if len(self.masks) != 1 or self.masks[0].fill is None:
            return False
        return self.masks[0].hides == value and self._is_same(score, self.masks[0].element)

    def _is_same(self, a: Element, b: Element) -> bool:
        *_, a = self.points.chain(a)
        *_, b = self.points.chain(b)
        return self.points.is_same(a, b)
