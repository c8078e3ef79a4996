"""What a product with an INT4 weight needs to know of how codes meet the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from tvm import tirx

from .contraction import LANES, Contraction
from .emit import Loop

Row: TypeAlias = Sequence[tirx.Expr]
"""Indices of a row of the activations."""

Decode: TypeAlias = Callable[[tirx.Expr], Iterable[tirx.Expr]]
"""The parts of a vector of words."""


class Arithmetic(Protocol):
    """How the codes of a weight meet the activations.

    Attributes
    ----------
    lanes : int
        Of the vectors that it works on, a divisor of 16.
    parts : int
        Vectors that a vector of words decodes to, each a 32-bit element per lane.
    dtype : str
        Of the elements of parts.
    """

    lanes: int
    parts: int
    dtype: str

    def row(self, index: tirx.Expr) -> Row:
        """Where the activations of a row are."""

    def activation(self, row: Row, word: tirx.Expr, part: int) -> tirx.Expr:
        """The scalar that all lanes of a part meet."""

    def decoder(self, tile: tirx.Expr, group: tirx.Expr) -> Decode:
        """Emits what decoding words of a group takes."""

    def start(
        self, rows: Sequence[Row], at: Sequence[tirx.Expr], group: tirx.Expr
    ) -> list[list[tirx.Buffer]]:
        """Emits sums [row][vector] of a group at their start, for the tiles `at`."""

    def scale(self, row: Row, group: tirx.Expr) -> tirx.Expr | None:
        """That of the activations, if they have one."""

    def add(self, sums: tirx.Expr, part: tirx.Expr, activation: tirx.Expr) -> tirx.Expr:
        """Sums and the product of two vectors."""


MakeArithmetic: TypeAlias = Callable[[Contraction, Loop], Arithmetic]
"""Of a product; it may copy the activations, in a loop over rows."""


def same(value: int) -> tirx.Expr:
    """A vector of one value for words of codes."""
    return tirx.Broadcast(tirx.const(value, "uint32"), LANES)
