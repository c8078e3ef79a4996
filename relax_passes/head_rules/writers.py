"""What a walk of `HeadSelector` writes: the same graph for other heads."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from .selection import Selection
from .weight_edits import WeightEdits


class HeadWriter:
    """Emits by the block builder of a mutator, which knows what replaces values of before."""

    def __init__(self, mutator: Any, suffix: str = "") -> None:
        self.mutator, self.suffix = mutator, suffix

    def keep(self, expr: relax.Expr) -> relax.Expr:
        return self.mutator.visit_expr(expr)

    def emit(self, value: relax.Expr, like: relax.Var) -> relax.Expr:
        return self.mutator.builder_.emit(value, like.name + self.suffix.replace(".", "_"))

    def passes(self, kind: int, through: relax.Var | None = None) -> None:
        """The kind mattered when the heads were compared."""


class SelectRows(HeadWriter):
    """Ends in new weights that hold the selected entries."""

    def __init__(self, mutator: Any, edits: WeightEdits, suffix: str) -> None:
        super().__init__(mutator, suffix)
        self.edits = edits

    def leaf(self, source: relax.Expr, selection: Selection) -> relax.Expr:
        array = self.edits.array(source)
        if np.array_equal(selection.index, np.arange(array.shape[selection.axis])):
            return self.keep(source)
        picked = array.take(selection.index, selection.axis)
        return self.edits.add(source, picked, getattr(source, "name", "") + self.suffix)


class ReplaceRows(HeadWriter):
    """Ends in a new weight of these rows, (n, m), along the selected axis."""

    def __init__(self, mutator: Any, edits: WeightEdits, rows: np.ndarray) -> None:
        super().__init__(mutator)
        self.edits, self.rows = edits, rows

    def leaf(self, source: relax.Expr, selection: Selection) -> relax.Expr:
        array = np.moveaxis(self.rows, 0, selection.axis)
        return self.edits.add(source, array, getattr(source, "name", ""))


class ContinueFrom(HeadWriter):
    """Ends in a value that stands for the one where the walk stops."""

    def __init__(self, mutator: Any, value: relax.Expr) -> None:
        super().__init__(mutator)
        self.value = value

    def leaf(self, source: relax.Expr, selection: Selection) -> relax.Expr:
        return self.value
