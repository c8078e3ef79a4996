"""Products of INT8 activations, see `int8_matmul`, and an INT4 weight on tensor cores.

Codes stay where they are in a byte, in its upper half, so that the left factor is 16 code: with the
upper bit turned over 16 (code - 8) for symmetric ones, as s8, else u8, from whose sums 16 zero
times that of the activations is taken away, in integers.

The sum of a group starts at the bits of 1.5 · 2¹⁹, whose neighbours, 2²² on each side, count by
1 / 16: read as a float32 it is 1.5 · 2¹⁹ + sum / 16. One fused multiply-add takes that away and
scales by the weight's scale, exactly before its one rounding, since 1.5 · 2¹⁹ times a float16 is a
float32. Where each channel is one group, its scale is divided by 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import fused_multiply_add, load_shared, local, opaque
from ..emit import Index, int32_variable
from .block import Block, int64_of
from .products import Group, Products, Total, word
from .tile import TOKENS

_UPPER, _SIGNS = 0xF0F0F0F0, 0x80808080

_BITS, _VALUE, _MANTISSA = 0x4B400000, 1.5 * 2.0**23, 23
"""A float32 whose neighbours count by one, and the bits of a mantissa."""

LARGEST_GROUP = (1 << 22) // (15 * 16 * 127)
"""Columns whose sum certainly lies within 2²²."""

LARGEST_CHANNEL = (1 << 31) // (16 * 16 * 128)
"""Columns whose sum certainly is an int32."""

Pair: TypeAlias = list[tirx.Expr]


@dataclass(frozen=True)
class Scales:
    """Of each tile of channels, for channels 0…7 and 8…15: scales, these times minus what sums
    start with as a float32, and -`unit` times the zero points if there are any.
    """

    scales: list[Pair]
    minus: list[Pair]
    zeros: list[Pair]


@dataclass(frozen=True)
class Int8Products(Products):
    """`sums` are int32 where each channel is one group, `mask` is that of upper halves."""

    columns: ClassVar[int] = 32
    together: ClassVar[int] = 2

    unit: ClassVar[int] = 16
    """What the product of two codes counts in sums, which start at 1.5 · 2²³ / `unit`."""

    mask: tirx.Buffer

    @property
    def _start(self) -> float:
        return _VALUE / self.unit

    @property
    def _start_bits(self) -> tirx.Expr:
        return word(_BITS - ((self.unit.bit_length() - 1) << _MANTISSA))

    @classmethod
    def allocate(cls, block: Block) -> Self:
        mask, grouped = local(1, "uint32"), block.stage.groups > 0
        T.buffer_store(mask, opaque(_UPPER), [0])
        count, dtype = (
            block.tile.channels * block.tile.tokens * 4,
            "float32" if grouped else "uint32",
        )
        return cls(block, local(count, dtype, value=0), mask)

    @property
    def _is_symmetric(self) -> bool:
        return self.block.operands.weight.zero_point is None

    @property
    def kind(self) -> str:
        return "s8" if self._is_symmetric else "u8"

    def zeros(self, channel: int, group: Group) -> Sequence[tirx.Expr]:
        """None: they are taken away from sums."""
        return []

    def decode(
        self,
        register: tirx.Expr,
        words: tirx.Buffer,
        step: Index,
        i: int,
        zeros: Sequence[tirx.Expr],
    ) -> None:
        """The lower halves of word i are step 0, the upper ones step 1."""
        codes = words[i] << T.Cast("uint32", 4 - step * 4) & self.mask[0]
        value = codes ^ word(_SIGNS) if self._is_symmetric else codes
        T.buffer_store(register.source, value, list(register.indices))

    def scales(self, group: Group) -> Scales:
        if not self.block.stage.groups:
            return Scales([], [], [])
        channels = range(self.block.tile.channels)
        zeros = [] if self._is_symmetric else [self._zero_points(c, group) for c in channels]
        scales, minus = self.weight_scales(group), []
        for pair in scales:
            buffer = local(2)
            for u in range(2):
                T.buffer_store(buffer, pair[u] * tirx.const(-self._start, "float32"), [u])
            minus.append([buffer[0], buffer[1]])
        return Scales(scales, minus, zeros)

    def _zero_points(self, channel: int, group: Group) -> Pair:
        """-`unit` times those of channels 0…7 and of 8…15."""
        byte, zeros = self.zero_byte(channel, group), local(2, "uint32")
        for u in range(2):
            left = self.unit.bit_length() - 1 - 4 * u
            value = byte << word(left) if left >= 0 else byte >> word(-left)
            T.buffer_store(zeros, word(0) - (value & word(15 * self.unit)), [u])
        return [zeros[0], zeros[1]]

    def totals(self, tokens: range, group: Group, scales: Scales) -> dict[tuple[int, int], Total]:
        if not self.block.stage.groups:
            return self.plain_totals(tokens)
        start = {at: [self._start_bits] * 4 for at in self.results(tokens)}
        if not self._is_symmetric:
            first = self.block.stage.activation_sums
            x_sums = self._of_tokens(tokens, first, group.index, group.slice, "uint32")
            for (token, channel), values in start.items():
                minus = scales.zeros[channel]
                start[token, channel] = [
                    values[i] + minus[i // 2] * x_sums[token][i % 2] for i in range(4)
                ]
        return {at: Total(local(4, "uint32"), 0, start[at]) for at in self.results(tokens)}

    def add_group(
        self,
        totals: dict[tuple[int, int], Total],
        scales: Scales,
        tokens: range,
        group: Group,
    ) -> None:
        first, part = self.block.stage.activation_scales, self._part(group)
        x_scales = self._of_tokens(tokens, first, part, group.slice)
        for (token, channel), total in totals.items():
            weight_scales, minus = scales.scales[channel], scales.minus[channel]
            at, scaled = self.at(token, channel), local(4)
            for i in range(4):
                value = tirx.reinterpret("float32", total.buffer[i])
                self._scale(scaled[i], value, weight_scales[i // 2], minus[i // 2])
                value = self.sums[at + i] + scaled[i] * x_scales[token][i % 2]
                T.buffer_store(self.sums, value, [at + i])

    def _scale(
        self, result: tirx.Expr, value: tirx.Expr, scale: tirx.Expr, minus: tirx.Expr
    ) -> None:
        """(value - start) scale; a float32 scale times what sums start with would be rounded."""
        if self.block.stage.scale_width == 2:
            fused_multiply_add(result, value, scale, minus)
        else:
            exact = value - tirx.const(self._start, "float32")
            T.buffer_store(result.source, exact * scale, list(result.indices))

    def _part(self, group: Group) -> Index:
        """The part of activations in which a group is, among those of the slice."""
        groups, together = self.block.stage.groups, self.block.operands.groups_per_scale
        if groups % together and together % groups:
            return group.number // together - (group.number - group.index) // together
        return group.index // together

    def _of_tokens(
        self, tokens: range, start: int, index: Index, slice_: tirx.Expr, dtype: str = "float32"
    ) -> dict[int, Pair]:
        """What a group or part has for this lane's two tokens of each tile, see `Stage.place`."""
        stage, found = self.block.stage, {}
        tiles = 2 if stage.pairs_tiles else 1
        for token in tokens[::tiles]:
            words = local(2 * tiles, dtype)
            at = self.token_tile(token) * TOKENS + self.block.lane % 4 * (2 * tiles)
            if stage.tokens < self.block.tile.block_tokens:
                at = tirx.min(at, stage.token_pitch - 2)
            load_shared(words, 0, slice_, start + (index * stage.token_pitch + at) * 4, 2 * tiles)
            for t in range(tiles):
                found[token + t] = [words[2 * t], words[2 * t + 1]]
        return found

    def finish(self) -> tirx.Buffer:
        if self.block.stage.groups:
            return self.sums
        block, tile = self.block, self.block.tile
        results = local(tile.channels * tile.tokens * 4)
        for token in range(tile.tokens):
            x_scales = [self._of_row(token, e, block.operands.x_scale) for e in range(2)]
            x_sums = []
            if not self._is_symmetric:
                x_sums = [self._of_row(token, e, block.operands.x_sums) for e in range(2)]
            for channel in range(tile.channels):
                self._finish_tile(results, token, channel, x_scales, x_sums)
        return results

    def _finish_tile(
        self, results: tirx.Buffer, token: int, channel: int, x_scales: Pair, x_sums: Pair
    ) -> None:
        at, scales = self.at(token, channel), self.channel_scales(channel, 1.0 / self.unit)
        zeros = [] if self._is_symmetric else self._channel_zeros(channel)
        for i in range(4):
            total = tirx.reinterpret("int32", self.sums[at + i])
            if zeros:
                total = total + zeros[i // 2] * x_sums[i % 2]
            value = total.astype("float32") * (scales[i // 2] * x_scales[i % 2])
            T.buffer_store(results, value, [at + i])

    def _channel_zeros(self, channel: int) -> Pair:
        """As `_zero_points`, for the first of the blocks and warps along k only."""
        block = self.block
        is_first = tirx.all(block.part == 0, block.warp_k == 0)
        every = Group(0, tirx.const(0, "int32"), 0, block.shared)
        zeros = [zero.astype("int32") for zero in self._zero_points(channel, every)]
        return [int32_variable(T.Select(is_first, zero, tirx.const(0, "int32"))) for zero in zeros]

    def _of_row(self, token: int, e: int, values: tirx.Buffer) -> tirx.Expr:
        """What there is for a token, of this lane's two of a tile."""
        block = self.block
        row = self.token_tile(token) * 8 + block.lane % 4 * 2 + e
        here = tirx.min(block.first_row + int64_of(row), block.operands.rows - 1)
        value = values[here]
        return int32_variable(value) if str(value.ty.dtype) == "int32" else T.Bind(value)
