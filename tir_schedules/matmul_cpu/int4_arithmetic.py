"""What a product with an INT4 weight needs to know of how codes meet the activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import LANES, Contraction, Int4Weight
from ..emit import Loop, registers
from .int4_decode import Decode

Row: TypeAlias = Sequence[tirx.Expr]
"""Indices of a row of the activations."""


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
    groups_per_scale : int
        Groups of the weight that meet one scale of the activations.
    """

    lanes: int
    parts: int
    dtype: str
    groups_per_scale: int

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

    def scale(self, row: Row, index: tirx.Expr) -> tirx.Expr | None:
        """That of the activations of `groups_per_scale` groups, if they have one."""

    def add(self, sums: tirx.Expr, part: tirx.Expr, activation: tirx.Expr) -> tirx.Expr:
        """Sums and the product of two vectors."""


MakeArithmetic: TypeAlias = Callable[[Contraction, Loop], Arithmetic]
"""Of a product; it may copy the activations, in a loop over rows."""


class FloatArithmetic(ABC):
    """What arithmetics of activations without scales share: float32 sums, and a copy (row, …)."""

    lanes, groups_per_scale = LANES, 1

    def __init__(self, product: Contraction, loop: Loop) -> None:
        assert isinstance(product.rhs, Int4Weight)
        self.weight = product.rhs
        self.x = self.copy(product, loop)

    @staticmethod
    @abstractmethod
    def copy(product: Contraction, loop: Loop) -> tirx.Buffer:
        """Emits the copy, zero from k on, where codes are padding."""

    def row(self, index: tirx.Expr) -> Row:
        return [T.Bind(index)]

    def start(
        self, rows: Sequence[Row], at: Sequence[tirx.Expr], group: tirx.Expr
    ) -> list[list[tirx.Buffer]]:
        return [registers(len(at)) for _ in rows]

    def scale(self, row: Row, index: tirx.Expr) -> None:
        return None
