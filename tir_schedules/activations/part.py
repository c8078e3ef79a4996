"""What a thread of the CUDA kernel that quantizes activations does, see `cuda`.

Packed codes of INT4 share a byte with those 32 columns on, which another thread has, maybe one of
the next part: those of a unit of 64 columns are in one warp, and the one with the lower columns
writes the words of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import (
    add_bytes,
    allocate_shared,
    from_lane,
    from_neighbour,
    load_shared,
    local,
    permute_bytes,
    store_shared,
    synchronize,
)
from ..emit import when
from ..int4_format.activation_format import magnitude
from ..matmul_cuda.block import int64_of
from .quotients import Quotients
from .shape import COLUMNS, UNIT_PIECES, WARP, Shape

Combine: TypeAlias = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]


@dataclass(frozen=True)
class Part:
    """What a thread does: `number` counts the parts of all rows, `lane` the threads of a part."""

    shape: Shape
    number: tirx.Expr
    lane: tirx.Expr

    @property
    def row(self) -> tirx.Expr:
        return self.number // self.shape.parts_in_pairs

    @property
    def part(self) -> tirx.Expr:
        """Of the row."""
        return self.number % self.shape.parts_in_pairs

    def emit(
        self, x: tirx.Buffer, codes: tirx.Buffer, scale: tirx.Buffer, sums: tirx.Buffer
    ) -> None:
        shared = allocate_shared(2 * WARP * 4, "maxima") if self.shape.lanes > WARP else None
        values = self._load(x)
        largest = local(1, "int32", value=0)
        for i in range(self.shape.vectors * COLUMNS):
            value = magnitude(values[i].astype("float32"))
            T.buffer_store(largest, tirx.max(largest[0], value), [0])
        self._over_lanes(largest, self.shape.lanes, tirx.max, shared, 0)
        quotients = Quotients.by_scale(largest[0], str(x.dtype), self.shape.form)
        total = local(1, "int32", value=0)
        for vector in range(self.shape.vectors):
            self._store_codes(codes, vector, values, quotients, total)
        self._over_lanes(total, self.shape.group_lanes, lambda a, b: a + b, shared, WARP * 4)
        at = int64_of(self.row) * self.shape.parts + int64_of(self.part)
        with when(tirx.all(*self._exists(), self.lane == 0)):
            T.buffer_store(scale, quotients.scale, [at])
        group = self.lane // self.shape.group_lanes
        with when(tirx.all(*self._exists(), *self._is_piece(0), self._starts_group())):
            T.buffer_store(sums, total[0], [at * self.shape.groups + int64_of(group)])

    def _starts_group(self) -> tirx.Expr:
        return self.lane % self.shape.group_lanes == 0

    def _exists(self) -> list[tirx.Expr]:
        """Whether there is such a part, if that is a question."""
        found, shape = [], self.shape
        if shape.parts_per_block > 1:
            found.append(int64_of(self.number) < shape.rows * shape.parts_in_pairs)
        if shape.parts_in_pairs > shape.parts:
            found.append(self.part < shape.parts)
        return found

    def _piece(self, vector: int) -> tirx.Expr:
        """Of a part."""
        return self.lane + vector * self.shape.lanes

    def _is_piece(self, vector: int) -> list[tirx.Expr]:
        if (vector + 1) * self.shape.lanes <= self.shape.pieces:
            return []
        return [self._piece(vector) < self.shape.pieces]

    def _load(self, x: tirx.Buffer) -> tirx.Buffer:
        """This thread's columns, zeros for those behind the last."""
        shape, dtype = self.shape, str(x.dtype)
        size = gcd(shape.k, COLUMNS, 16 // x.dtype.itemsize)
        values = local(shape.vectors * COLUMNS, dtype, value=0)
        for vector in range(shape.vectors):
            first = T.Cast("int32", self.part) * shape.columns + self._piece(vector) * COLUMNS
            for i in range(0, COLUMNS, size):
                inside = [*self._exists(), *self._is_piece(vector)]
                if shape.k < shape.parts * shape.columns:
                    inside.append(first + i < shape.k)
                with when(tirx.all(*inside) if inside else True), T.vectorized(0, size) as e:
                    at = int64_of(self.row) * shape.k + int64_of(first + i) + int64_of(e)
                    T.buffer_store(values, x[at], [vector * COLUMNS + i + e])
        return values

    def _store_codes(
        self,
        codes: tirx.Buffer,
        vector: int,
        values: tirx.Buffer,
        quotients: Quotients,
        total: tirx.Buffer,
    ) -> None:
        """Write two words, and add their codes to `total`."""
        words, rounded = local(2, "int32"), local(COLUMNS, "uint32")
        for i in range(COLUMNS):
            T.buffer_store(
                rounded, quotients.code(values[vector * COLUMNS + i].astype("float32")), [i]
            )
        for odd in range(2):
            packed = _lowest_bytes([rounded[2 * i + odd] for i in range(4)])
            T.buffer_store(words, T.Cast("int32", packed), [odd])
            add_bytes(total[0], words[odd])
        if self.shape.form.packed:
            self._store_packed(codes, vector, words)
            return
        inside = [*self._exists(), *self._is_piece(vector)]
        with when(tirx.all(*inside) if inside else True), T.vectorized(0, 2) as odd:
            at = int64_of(self.number) * (self.shape.columns // 4) + int64_of(
                self._piece(vector) * 2 + odd
            )
            T.buffer_store(codes, words[odd], [at])

    def _store_packed(self, codes: tirx.Buffer, vector: int, words: tirx.Buffer) -> None:
        """Two words that also hold the codes 32 columns on, of another thread."""
        shape, nibbles = self.shape, tirx.const(0x0F0F0F0F, "int32")
        piece = T.Bind(T.Cast("int32", self.part) * shape.pieces + self._piece(vector))  # of a row
        for odd in range(2):
            upper = self._from_other_half(words[odd], piece)
            T.buffer_store(words, words[odd] & nibbles | (upper & nibbles) << 4, [odd])
        is_lower = piece % UNIT_PIECES < UNIT_PIECES // 2
        is_there = self._is_piece(vector) if shape.parts > 1 else [piece < shape.words]
        with when(tirx.all(*self._exists(), *is_there, is_lower)), T.vectorized(0, 2) as odd:
            word = piece // UNIT_PIECES * UNIT_PIECES + piece % (UNIT_PIECES // 2) * 2 + odd
            at = int64_of(self.row) * shape.words + int64_of(word)
            T.buffer_store(codes, words[odd], [at])

    def _from_other_half(self, value: tirx.Expr, piece: tirx.Expr) -> tirx.Expr:
        """`value` of the thread whose piece of the row is 32 columns from `piece`."""
        shape = self.shape
        if shape.parts == 1 or shape.pieces == shape.lanes:
            return from_neighbour(value, UNIT_PIECES // 2)
        other = piece ^ (UNIT_PIECES // 2)  # two parts of 12 pieces in a warp
        there = other // shape.pieces * shape.lanes + other % shape.pieces
        return from_lane(value, there % WARP)

    def _over_lanes(
        self,
        register: tirx.Buffer,
        lanes: int,
        combine: Combine,
        shared: tirx.Expr | None,
        at: int,
    ) -> None:
        """Combine what `lanes` threads side by side have; `at`: of their room in `shared`."""
        _over_warp(register, min(lanes, WARP), combine)
        if lanes <= WARP:
            return
        assert shared is not None
        warps, found = lanes // WARP, local(1)
        with when(self.lane % WARP == 0):
            value = tirx.reinterpret("float32", register[0])
            store_shared(shared, at + self.lane // WARP * 4, value)
        synchronize()
        load_shared(found, 0, shared, at + self.lane % warps * 4, 1)
        T.buffer_store(register, tirx.reinterpret("int32", found[0]), [0])
        _over_warp(register, warps, combine)


def _over_warp(register: tirx.Buffer, lanes: int, combine: Combine) -> None:
    for bit in range(lanes.bit_length() - 1):
        other = from_neighbour(register[0], 1 << bit)
        T.buffer_store(register, combine(register[0], other), [0])


def _lowest_bytes(words: list[tirx.Expr]) -> tirx.Expr:
    """Of four words, in one."""
    packed = local(3, "uint32")
    for half in range(2):
        pair = tirx.const(0x0040, "uint32")
        permute_bytes(packed[half], words[2 * half], words[2 * half + 1], pair)
    permute_bytes(packed[2], packed[0], packed[1], tirx.const(0x5410, "uint32"))
    return packed[2]
