"""Products of float activations and an INT4 weight on tensor cores, in float16 or bfloat16.

A lane reads a word of eight codes and masks them, two at a time, into the mantissas of 1024 and 64
in float16, of 128 in bfloat16; taking away that and the zero point gives code - zero, exactly. A
group is summed up in float32 and scaled once: on the sums, not the weights, so that nothing is
rounded but sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import add_pairs, local, opaque
from ..emit import Index
from .block import Block
from .products import Group, Products, Total, word
from .terms import term_exponent

_BASE = {"float16": (0x6400, 0x5400), "bfloat16": (0x4300, 0x4300)}
"""Bits of the number whose mantissa a code is put into: those of channels 0…7 and of 8…15."""

_HIGH = {"float16": (0, 4), "bfloat16": (0, 0)}
"""How many bits the code lies above the lowest of the mantissa."""

_MASKS, _PAIR, _SIGN = (0x000F000F, 0x00F000F0), 0x00010001, 0x8000


@dataclass(frozen=True)
class HalfProducts(Products):
    """`masks` are those of low and of high nibbles."""

    columns: ClassVar[int] = 16
    together: ClassVar[int] = 8

    masks: tirx.Buffer

    @classmethod
    def allocate(cls, block: Block) -> Self:
        masks = local(2, "uint32")
        for i, mask in enumerate(_MASKS):
            T.buffer_store(masks, opaque(mask), [i])
        return cls(block, local(block.tile.channels * block.tile.tokens * 4, value=0.0), masks)

    @property
    def kind(self) -> str:
        return "bfloat16" if self.block.stage.terms > 1 else str(self.block.operands.x.dtype)

    @property
    def _factor(self) -> float:
        """Of the weight's scales; its inverse is that of terms."""
        return 2.0 ** term_exponent(self.block.operands)

    def zeros(self, channel: int, group: Group) -> Sequence[tirx.Expr]:
        """-(base + zero point), twice in a word."""
        bases = [(base | _SIGN) * _PAIR for base in _BASE[self.kind]]
        units = [_PAIR << high for high in _HIGH[self.kind]]
        if self.block.operands.weight.zero_point is None:
            return [word(base + 8 * unit) for base, unit in zip(bases, units, strict=True)]
        byte, minus = self.zero_byte(channel, group), local(2, "uint32")
        for u in range(2):
            high = _HIGH[self.kind][u]
            value = byte >> word(4 * u - high) if 4 * u > high else byte
            T.buffer_store(minus, value & self.masks[min(high, 1)] | word(bases[u]), [u])
        return [minus[0], minus[1]]

    def decode(
        self,
        register: tirx.Expr,
        words: tirx.Buffer,
        step: Index,
        i: int,
        zeros: Sequence[tirx.Expr],
    ) -> None:
        """Word `step`; i counts channels 0…7 and 8…15 of columns 0…7, then of 8…15."""
        high = _HIGH[self.kind][i % 2]
        shift = 4 * i - high
        codes = words[step] >> word(shift) if shift else words[step]
        value = codes & self.masks[min(high, 1)] | word(_BASE[self.kind][i % 2] * _PAIR)
        T.buffer_store(register.source, value, list(register.indices))
        add_pairs(register, zeros[i % 2], self.kind)

    def scales(self, group: Group) -> list[list[tirx.Expr]]:
        return self.weight_scales(group, self._factor) if self.block.stage.groups else []

    def totals(
        self, tokens: range, group: Group, scales: list[list[tirx.Expr]]
    ) -> dict[tuple[int, int], Total]:
        if not self.block.stage.groups:
            return self.plain_totals(tokens)
        start = [tirx.const(0.0, "float32")] * 4
        return {at: Total(local(4), 0, start) for at in self.results(tokens)}

    def add_group(
        self,
        totals: dict[tuple[int, int], Total],
        scales: list[list[tirx.Expr]],
        tokens: range,
        group: Group,
    ) -> None:
        for (token, channel), total in totals.items():
            at = self.at(token, channel)
            for i in range(4):
                value = self.sums[at + i] + total.buffer[i] * scales[channel][i // 2]
                T.buffer_store(self.sums, value, [at + i])

    def finish(self) -> tirx.Buffer:
        if not self.block.stage.groups:
            for channel in range(self.block.tile.channels):
                scales = self.channel_scales(channel, self._factor)
                for token in range(self.block.tile.tokens):
                    for i in range(4):
                        at = self.at(token, channel) + i
                        T.buffer_store(self.sums, self.sums[at] * scales[i // 2], [at])
        return self.sums
