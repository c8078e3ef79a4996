"""Select heads of a tensor by selecting where they are made: rows of weights, channels of biases.

Selecting entries of an axis commutes with every op that treats the entries of that axis alike, so
a selection after such ops equals one before them, down to the weights. One walk serves to find
out which rows of which weights make which head, and to write the same graph for fewer heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tvm import relax
from tvm.ir import Op

VIEW, LINEAR, OTHER = range(3)
"""What lies between the weights and a head: reshapes and sums; linear ops; anything."""


class NotPerHead(ValueError):
    """Heads can't be told apart at some op; the message says at which, and why."""


@dataclass(frozen=True)
class Selection:
    """The entries `index` of `axis`; `heads` tells which head each is of."""

    axis: int
    index: np.ndarray
    heads: np.ndarray

    @staticmethod
    def of(axis: int, index: np.ndarray) -> Selection:
        return Selection(axis, np.asarray(index), np.asarray(index))

    @staticmethod
    def blocks(axis: int, count: int, size: int) -> Selection:
        """The first `count` entries, of which each `size` are a head."""
        return Selection(axis, np.arange(count), np.arange(count) // size)

    @property
    def key(self) -> tuple[int, bytes]:
        return self.axis, self.index.tobytes()


class Writer(Protocol):
    """What a walk does with what it meets."""

    def leaf(self, source: relax.Expr, selection: Selection) -> relax.Expr:
        """The selected entries of an argument, a constant, or a value the walk stops at."""

    def keep(self, expr: relax.Expr) -> relax.Expr:
        """A value that no head enters."""

    def emit(self, value: relax.Expr, like: relax.Var) -> relax.Expr:
        """The value that takes the place of `like`."""

    def passes(self, kind: int, through: relax.Var | None = None) -> None:
        """An op on the way, of this kind, and a variable that it reads beside its operand."""


class Walk(Protocol):
    """What a rule for one op asks of the walk."""

    bound: Mapping[relax.Var, relax.Expr]
    writer: Writer

    def select(self, expr: relax.Expr, selection: Selection) -> relax.Expr: ...

    def is_projected(self, expr: relax.Expr) -> bool: ...


def op_name(value: relax.Expr) -> str:
    op = getattr(value, "op", None)
    return op.name.replace("relax.", "R.") if isinstance(op, Op) else type(value).__name__
