"""Products of INT4 activations, two codes a byte (see `int8_matmul`), and an INT4 weight.

A unit's 32 bytes of a token lie as those of the weight do: low halves of bytes are its first 32
columns, high ones the others. Tensor cores of sm_80 to sm_89 multiply such words by each other, as
they are. Those after them have no INT4: there both factors become INT8, each 16 times its code in
the upper half of a byte, which the sums count as 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import local
from ..emit import Index
from .int8 import Int8Products
from .operands import Operands
from .products import Group, word
from .tile import UNIT

_SIGNS = 0x88888888


@dataclass(frozen=True)
class Int4Products(Int8Products):
    """Both factors as INT8. With codes -7…7 no sum is beyond those of `Int8Products`."""

    unit: ClassVar[int] = 256

    def _activations(self, token: int, group: Group, term: int) -> tirx.Buffer:
        """Step 2 u is the lower halves of unit u, step 2 u + 1 the upper ones."""
        words, steps = self._units(token, group, term), group.steps
        factors = local(steps * 2, "uint32")
        for step in range(steps):
            unit, upper = divmod(group.index * steps % 2 + step, 2)
            for i in range(2):
                codes = words[2 * unit + i] if upper else words[2 * unit + i] << word(4)
                T.buffer_store(factors, codes & self.mask[0], [2 * step + i])
        return factors

    def _units(self, token: int, group: Group, term: int) -> tirx.Buffer:
        """Two words of each unit of a group, or of that which it lies in."""
        first = group.index * group.steps * self.columns // UNIT
        count = max(1, group.steps * self.columns // UNIT)
        return self._right_factors(token, group.slice, term, first, count)


@dataclass(frozen=True)
class NativeInt4Products(Int4Products):
    """Both factors as they are: of the weight, symmetric codes in two's complement."""

    columns: ClassVar[int] = 64
    unit: ClassVar[int] = 1

    @property
    def kind(self) -> str:
        return "s4" if self._is_symmetric else "u4"

    def decode(
        self,
        register: tirx.Expr,
        words: tirx.Buffer,
        step: Index,
        i: int,
        zeros: Sequence[tirx.Expr],
    ) -> None:
        T.buffer_store(register.source, self._signed(words[i]), list(register.indices))

    def _signed(self, codes: tirx.Expr) -> tirx.Expr:
        return codes ^ word(_SIGNS) if self._is_symmetric else codes

    def _activations(self, token: int, group: Group, term: int) -> tirx.Buffer:
        return self._units(token, group, term)


@dataclass(frozen=True)
class HalfUnitInt4Products(NativeInt4Products):
    """Of groups of half a unit: a product of the whole one, of whose weight the rest is 0."""

    columns: ClassVar[int] = 32

    def decode(
        self,
        register: tirx.Expr,
        words: tirx.Buffer,
        step: Index,
        i: int,
        zeros: Sequence[tirx.Expr],
    ) -> None:
        half = T.Select(step == 1, self.mask[0], ~self.mask[0])
        value = self._signed(words[i]) & half
        T.buffer_store(register.source, value, list(register.indices))


def int4_products(operands: Operands) -> type[Int4Products]:
    if not operands.has_int4_products:
        return Int4Products
    return HalfUnitInt4Products if operands.halves_units else NativeInt4Products
