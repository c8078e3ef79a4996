"""What all kinds of CUDA INT4 products have in common: the walk over a slice in shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Self

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import load_matrices, load_shared, local, multiply_add, replicate_byte
from ..cuda_wgmma import (
    ROW_BYTES,
    STEP_BYTES,
    begin_products,
    descriptor,
    descriptor_start,
    set_register,
    start_product,
    wait_for_products,
)
from ..emit import Index, int64
from ..tir_nodes import is_const
from .block import Block, int64_of
from .tile import CHANNELS, TOKENS, UNIT, UNIT_BYTES, ZERO_BYTES, ZERO_GROUPS


@dataclass(frozen=True)
class Group:
    """Columns of a slice that share scales, all of them where each channel is one group.

    `index` counts the groups of the slice, `number` those of the weight.
    """

    index: int
    number: tirx.Expr
    steps: int
    slice: tirx.Expr


@dataclass(frozen=True)
class Total:
    """Four registers for sums, and what these start with; None: with what is there."""

    buffer: tirx.Buffer
    first: int
    start: Sequence[tirx.Expr] | None


@dataclass(frozen=True)
class Products(ABC):
    """`sums` has, of each tile of channels and of tokens, the four results of this lane.

    Results 2 u + e are of channel lane // 4 + 8 u and token 2 (lane % 4) + e.
    """

    columns: ClassVar[int]
    """Of one product on tensor cores."""

    together: ClassVar[int]
    """Tiles of tokens whose products run side by side: each waits for the last one of its sum."""

    block: Block
    sums: tirx.Buffer

    @classmethod
    @abstractmethod
    def allocate(cls, block: Block) -> Self: ...

    @property
    @abstractmethod
    def kind(self) -> str:
        """Of the factors, see `multiply_add`."""

    @abstractmethod
    def zeros(self, channel: int, group: Group) -> Sequence[tirx.Expr]:
        """The zero points of channels 0…7 and of 8…15, as `decode` wants them."""

    @abstractmethod
    def decode(
        self,
        register: tirx.Expr,
        words: tirx.Buffer,
        step: Index,
        i: int,
        zeros: Sequence[tirx.Expr],
    ) -> None:
        """Register i of the left factor of a step of a unit, whose four words are there."""

    @abstractmethod
    def scales(self, group: Group) -> Any:
        """What `totals` and `add_group` need for all tokens."""

    @abstractmethod
    def totals(self, tokens: range, group: Group, scales: Any) -> dict[tuple[int, int], Total]:
        """Where the products of a group are added up, by token and channel."""

    @abstractmethod
    def add_group(
        self, totals: dict[tuple[int, int], Total], scales: Any, tokens: range, group: Group
    ) -> None:
        """Scale the sums of a group, and add them to `sums`."""

    @abstractmethod
    def finish(self) -> tirx.Buffer:
        """The sums in float32, with all scales."""

    def accumulate(self, first_unit: tirx.Expr, slice_: tirx.Expr) -> None:
        """Add the products of a slice."""
        groups, tile = max(1, self.block.stage.groups), self.block.tile
        steps = tile.units * UNIT // self.columns // groups
        for index in range(groups):
            group = Group(index, self.block.group(first_unit) + index, steps, slice_)
            weights = self._weights(group)
            scales = self.scales(group)
            if tile.wgmma:
                self._multiply_by_warpgroup(weights, scales, group)
                continue
            together = 2 if self.block.stage.terms > 1 else self.together
            for first in range(0, tile.tokens, together):
                tokens = range(first, min(first + together, tile.tokens))
                self._multiply(weights, scales, tokens, group)

    def at(self, token: int, channel: int) -> int:
        """Where the sums of a tile of tokens and of channels are."""
        return (channel * self.block.tile.tokens + token) * 4

    def channel_tile(self, channel: int) -> tirx.Expr:
        """Of this block."""
        return self.block.warp_n * self.block.tile.channels + channel

    def token_tile(self, token: int) -> tirx.Expr:
        return self.block.warp_m * self.block.tile.tokens + token

    def _weights(self, group: Group) -> tirx.Buffer:
        """The left factors of a group, four registers a step."""
        tile, per_unit = self.block.tile, UNIT // self.columns
        weights = local(tile.channels * group.steps * 4, "uint32")
        first, together = group.index * group.steps, min(group.steps, per_unit)
        for channel in range(tile.channels):
            zeros, words = self.zeros(channel, group), local(4, "uint32")
            with T.unroll(group.steps // together) as index:
                unit = first // per_unit + index
                at = (self.channel_tile(channel) * tile.units + unit) * UNIT_BYTES
                load_shared(words, 0, group.slice, at + self.block.lane * 16, 4)
                with T.unroll(first % per_unit, first % per_unit + together) as inside:
                    step = index * together + inside - first % per_unit
                    for i in range(4):
                        register = weights[(channel * group.steps + step) * 4 + i]
                        self.decode(register, words, inside, i, zeros)
        return weights

    def _activations(self, token: int, group: Group, term: int) -> tirx.Buffer:
        """The right factors of 8 tokens, two registers a step."""
        steps = group.steps
        return self._right_factors(token, group.slice, term, group.index * steps, steps)

    def _right_factors(
        self, token: int, slice_: tirx.Expr, term: int, first: int, count: int
    ) -> tirx.Buffer:
        """Two registers for each 32 bytes of rows, as they are."""
        stage, lane = self.block.stage, self.block.lane
        factors = local(count * 2, "uint32")
        row = self.token_tile(token) * TOKENS + lane % 8
        if stage.tokens < self.block.tile.block_tokens:
            row = tirx.min(row, stage.tokens - 1)
        row = row * stage.terms + term
        start = stage.activations + row * stage.pitch + lane // 8 * (STEP_BYTES // 2)
        for step in range(0, count, 2):
            at = start + (first + step) * STEP_BYTES
            load_matrices(factors, step * 2, slice_, at, count=min(4, (count - step) * 2))
        return factors

    def _multiply(self, weights: tirx.Buffer, scales: Any, tokens: range, group: Group) -> None:
        """Add the products of a group with some tiles of tokens."""
        totals = self.totals(tokens, group, scales)
        for term in range(self.block.stage.terms):
            activations = {token: self._activations(token, group, term) for token in tokens}
            begun = int(term == 0 and self.block.stage.groups > 0)
            if begun:
                self._multiply_step(totals, weights, activations, 0, group.steps, starts=True)
            if begun < group.steps:
                with T.unroll(begun, group.steps) as step:
                    self._multiply_step(totals, weights, activations, step, group.steps)
        if self.block.stage.groups:
            self.add_group(totals, scales, tokens, group)

    def _multiply_step(
        self,
        totals: dict[tuple[int, int], Total],
        weights: tirx.Buffer,
        activations: dict[int, tirx.Buffer],
        step: Index,
        steps: int,
        starts: bool = False,
    ) -> None:
        for (token, channel), total in totals.items():
            first = (channel * steps + step) * 4
            left = [weights[first + i] for i in range(4)]
            right = [activations[token][step * 2 + i] for i in range(2)]
            start = total.start if starts else None
            multiply_add(total.buffer, total.first, left, right, self.kind, start)

    def _multiply_by_warpgroup(self, weights: tirx.Buffer, scales: Any, group: Group) -> None:
        """Add the products of a group with all tokens."""
        tokens, channels = range(self.block.tile.tokens), range(self.block.tile.channels)
        totals = self.totals(tokens, group, scales)
        starts = {channel: totals[0, channel].start for channel in channels}
        is_new = {c: start is not None and is_const(start[0], 0) for c, start in starts.items()}
        for total in totals.values():
            for i, value in enumerate(total.start or []):
                if not is_const(value, 0):
                    set_register(total.buffer[total.first + i], value)
        first_column = descriptor_start(group.slice)
        begin_products()
        with T.unroll(group.steps) as step:
            right = self._right(first_column, group, step)
            for channel in channels:
                first = (channel * group.steps + step) * 4
                parts = [totals[token, channel] for token in tokens]
                sums = [part.buffer[part.first + i] for part in parts for i in range(4)]
                left = [weights[first + i] for i in range(4)]
                adds = not is_new[channel] or step > 0
                start_product(sums, left, right, self.kind, adds)
        wait_for_products()
        if self.block.stage.groups:
            self.add_group(totals, scales, tokens, group)

    def _right(self, start: tirx.Expr, group: Group, step: Index) -> tirx.Expr:
        """The descriptor of the activations in a step of a group."""
        stage, number = self.block.stage, group.index * group.steps + step
        per_row = ROW_BYTES // STEP_BYTES
        at = number // per_row * (stage.tokens * ROW_BYTES) + number % per_row * STEP_BYTES
        at = at + stage.activations
        return descriptor(start, at)

    def results(self, tokens: range) -> list[tuple[int, int]]:
        """Tiles of tokens and channels, those of one token side by side."""
        return list(product(tokens, range(self.block.tile.channels)))

    def plain_totals(self, tokens: range) -> dict[tuple[int, int], Total]:
        """`sums` themselves: those of a channel that is one group."""
        return {at: Total(self.sums, self.at(*at), None) for at in self.results(tokens)}

    def weight_scales(self, group: Group, factor: float = 1.0) -> list[list[tirx.Expr]]:
        """Of each tile of channels, the scales of channels 0…7 and 8…15 times `factor`."""
        stage, width = self.block.stage, self.block.stage.scale_width
        scales = []
        for channel in range(self.block.tile.channels):
            row = self.channel_tile(channel) * stage.groups + group.index
            at = stage.scales + (row * CHANNELS + self.block.lane // 4 * 2) * width
            words, pair = local(width // 2, "uint32"), local(2)
            load_shared(words, 0, group.slice, at, width // 2)
            for u in range(2):
                T.buffer_store(pair, _scaled(_float(words, u, width), factor), [u])
            scales.append([pair[0], pair[1]])
        return scales

    def channel_scales(self, channel: int, factor: float = 1.0) -> list[tirx.Expr]:
        """As `weight_scales`, from global memory, where each channel is one group."""
        scale, index = self.block.operands.weight.scale, self.channel_tile(channel)
        values = [scale[self.block.channel_pair(index, u)].astype("float32") for u in range(2)]
        return [T.Bind(_scaled(value, factor)) for value in values]

    def zero_byte(self, channel: int, group: Group) -> tirx.Expr:
        """Zero points of channels 0…7 and, four bits on, of 8…15, in every byte."""
        words, byte = local(2, "uint32"), local(1, "uint32")
        block, tile = self.block, self.channel_tile(channel)
        if block.stage.has_zeros:
            row = tile * block.stage.zero_words + group.index // ZERO_GROUPS
            at = block.stage.zeros + row * ZERO_BYTES + block.lane // 4 * 4
            load_shared(words, 0, group.slice, at, 1)
        else:
            zeros = block.operands.weight.zero_point
            assert zeros is not None
            at = block.channel(tile), int64(0), int64_of(block.lane // 4)
            T.buffer_store(words, zeros[at], [0])
        at_byte = group.number if block.stage.groups < ZERO_GROUPS else group.index
        replicate_byte(byte[0], words[0], T.Cast("uint32", at_byte))
        return byte[0]


def word(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")


def _scaled(value: tirx.Expr, factor: float) -> tirx.Expr:
    return value if factor == 1.0 else value * tirx.const(factor, "float32")


def _float(words: tirx.Buffer, index: int, width: int) -> tirx.Expr:
    """Of the float16 or float32 in words, the one of an index."""
    if width == 4:
        return tirx.reinterpret("float32", words[index])
    half = words[0] >> word(16 * index) if index else words[0]
    return tirx.reinterpret("float16", T.Cast("uint16", half)).astype("float32")
