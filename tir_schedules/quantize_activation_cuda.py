"""The CUDA schedule of `int8_matmul.quantize_activation`: one pass over the activations.

The threads of a part, the columns that share a scale, keep it in registers, eight columns each, and
find its largest magnitude by shuffles, in parts of more than a warp by shared memory, too.

A quotient that is right in its last bit would be a call. Two corrections of x times the reciprocal
of the scale give it where nothing underflows, see `_Quotients`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from typing import TypeAlias

import numpy as np
from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target
from tvm.tirx.script import builder as T

from .cuda_ptx import (
    add_bytes,
    allocate_shared,
    approximate_reciprocal,
    from_neighbour,
    fused_multiply_add,
    load_shared,
    local,
    permute_bytes,
    store_shared,
    synchronize,
)
from .cuda_target import architecture
from .emit import ceildiv, int64, when, with_emitted_body
from .int8_matmul import LARGEST_CODE, QUANTIZE_ACTIVATION, SMALLEST_MAXIMUM, magnitude
from .matmul_cuda_block import int64_of
from .tir_nodes import collect, is_const

_COLUMNS = 8
"""Of a thread at a time: two words of codes."""

_WARP, _SMALLEST_BLOCK, _THREADS, _MOST_THREADS, _MOST_VECTORS = 32, 128, 256, 1024, 8
_SMALLEST_ARCH = 80
_VALUE = 1.5 * 2.0**23
"""A float32 whose neighbours count by one: added, it leaves an integer in the lowest bits."""

_SMALLEST = int(np.float32(SMALLEST_MAXIMUM).view("int32"))
_SMALL, _FACTOR = 2.0**-60, 2.0**40

Combine: TypeAlias = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]


class QuantizeActivationCuda(ScheduleRule):
    """Threads side by side for each part; left to other rules: one of more than 65536 columns.

    A part of float32 of more than 32768 columns has no room in registers, and spills.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None if it is not for this rule (or `tunable`)."""
        if target.kind.name != "cuda" or architecture(target) < _SMALLEST_ARCH or tunable:
            return None
        blocks = collect(func.body, s_tir.SBlock)
        if not any(QUANTIZE_ACTIVATION in block.annotations for block in blocks):
            return None
        shape = _Shape.of(*func.params)
        if shape.vectors > _MOST_VECTORS:
            return None
        emitted = with_emitted_body(func, lambda: _emit(shape, func.params))
        return s_tir.Schedule(emitted)


@dataclass(frozen=True)
class _Shape:
    """How rows are cut: into `parts` of `columns` columns, each of `groups` groups."""

    rows: tirx.Expr
    k: int
    parts: int
    columns: int
    groups: int

    @staticmethod
    def of(x: tirx.Buffer, codes: tirx.Buffer, scale: tirx.Buffer, sums: tirx.Buffer) -> _Shape:
        *rows, k = x.shape
        words, parts, groups = (int(buffer.shape[-1]) for buffer in (codes, scale, sums))
        count = prod(rows, start=int64(1))
        return _Shape(count, int(k), parts, words * 4 // parts, groups // parts)

    @property
    def pieces(self) -> int:
        """Eight columns each, of a part."""
        return self.columns // _COLUMNS

    @property
    def lanes(self) -> int:
        """Threads of a part, a power of two."""
        few = _power_of_two(-(-self.pieces // _MOST_VECTORS))
        return min(max(min(_power_of_two(self.pieces), _THREADS), few), _MOST_THREADS)

    @property
    def vectors(self) -> int:
        """Pieces of a thread."""
        return -(-self.pieces // self.lanes)

    @property
    def group_lanes(self) -> int:
        """Threads of a group."""
        return self.lanes if self.groups == 1 else self.pieces // self.groups

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.lanes if self.lanes > _WARP else _SMALLEST_BLOCK

    @property
    def parts_per_block(self) -> int:
        return self.threads // self.lanes


def _power_of_two(value: int) -> int:
    """The smallest that is no smaller."""
    return 1 << (value - 1).bit_length()


def _emit(shape: _Shape, params: list[tirx.Buffer]) -> None:
    if is_const(shape.rows, 0):
        T.evaluate(0)
        return
    with when(isinstance(shape.rows, tirx.IntImm) or shape.rows > 0):
        x, codes, scale, sums = (_flat(buffer, shape.rows) for buffer in params)
        count = shape.rows * shape.parts
        with (
            T.launch_thread("blockIdx.x", ceildiv(count, shape.parts_per_block)) as block,
            T.launch_thread("threadIdx.x", shape.threads) as thread,
        ):
            first = T.Cast("uint32", block) * shape.parts_per_block
            number = T.Bind(first + T.Cast("uint32", thread // shape.lanes))
            _Part(shape, number, thread % shape.lanes).emit(x, codes, scale, sums)


def _flat(buffer: tirx.Buffer, rows: tirx.Expr) -> tirx.Buffer:
    """As one axis: axes of rows would cost divisions."""
    size = rows * buffer.shape[-1]
    return T.decl_buffer((size,), str(buffer.dtype), data=buffer.data)


@dataclass(frozen=True)
class _Part:
    """What a thread does: `number` counts the parts of all rows, `lane` the threads of a part."""

    shape: _Shape
    number: tirx.Expr
    lane: tirx.Expr

    def emit(
        self, x: tirx.Buffer, codes: tirx.Buffer, scale: tirx.Buffer, sums: tirx.Buffer
    ) -> None:
        shared = allocate_shared(2 * _WARP * 4, "maxima") if self.shape.lanes > _WARP else None
        values = self._load(x)
        largest = local(1, "int32", value=0)
        for i in range(self.shape.vectors * _COLUMNS):
            value = magnitude(values[i].astype("float32"))
            T.buffer_store(largest, tirx.max(largest[0], value), [0])
        self._over_lanes(largest, self.shape.lanes, tirx.max, shared, 0)
        quotients = _Quotients.by_scale(largest[0], str(x.dtype))
        total = local(1, "int32", value=0)
        for vector in range(self.shape.vectors):
            self._store_codes(codes, vector, values, quotients, total)
        self._over_lanes(total, self.shape.group_lanes, lambda a, b: a + b, shared, _WARP * 4)
        with when(tirx.all(*self._exists(), self.lane == 0)):
            T.buffer_store(scale, quotients.scale, [int64_of(self.number)])
        group = self.lane // self.shape.group_lanes
        with when(tirx.all(*self._exists(), *self._is_piece(0), self._starts_group())):
            at = int64_of(self.number) * self.shape.groups + int64_of(group)
            T.buffer_store(sums, total[0], [at])

    def _starts_group(self) -> tirx.Expr:
        return self.lane % self.shape.group_lanes == 0

    def _exists(self) -> list[tirx.Expr]:
        """Whether there is such a part, if that is a question."""
        if self.shape.parts_per_block == 1:
            return []
        return [int64_of(self.number) < self.shape.rows * self.shape.parts]

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
        size = gcd(shape.k, _COLUMNS, 16 // x.dtype.itemsize)
        values = local(shape.vectors * _COLUMNS, dtype, value=0)
        row, part = self.number // shape.parts, self.number % shape.parts
        for vector in range(shape.vectors):
            first = T.Cast("int32", part) * shape.columns + self._piece(vector) * _COLUMNS
            for i in range(0, _COLUMNS, size):
                inside = [*self._exists(), *self._is_piece(vector)]
                if shape.k < shape.parts * shape.columns:
                    inside.append(first + i < shape.k)
                with when(tirx.all(*inside) if inside else True), T.vectorized(0, size) as e:
                    at = int64_of(row) * shape.k + int64_of(first + i) + int64_of(e)
                    T.buffer_store(values, x[at], [vector * _COLUMNS + i + e])
        return values

    def _store_codes(
        self,
        codes: tirx.Buffer,
        vector: int,
        values: tirx.Buffer,
        quotients: _Quotients,
        total: tirx.Buffer,
    ) -> None:
        """Write two words, and add their codes to `total`."""
        words, rounded = local(2, "int32"), local(_COLUMNS, "uint32")
        for i in range(_COLUMNS):
            T.buffer_store(
                rounded, quotients.code(values[vector * _COLUMNS + i].astype("float32")), [i]
            )
        for odd in range(2):
            packed = _lowest_bytes([rounded[2 * i + odd] for i in range(4)])
            T.buffer_store(words, T.Cast("int32", packed), [odd])
            add_bytes(total[0], words[odd])
        inside = [*self._exists(), *self._is_piece(vector)]
        with when(tirx.all(*inside) if inside else True), T.vectorized(0, 2) as odd:
            at = int64_of(self.number) * (self.shape.columns // 4) + int64_of(
                self._piece(vector) * 2 + odd
            )
            T.buffer_store(codes, words[odd], [at])

    def _over_lanes(
        self,
        register: tirx.Buffer,
        lanes: int,
        combine: Combine,
        shared: tirx.Expr | None,
        at: int,
    ) -> None:
        """Combine what `lanes` threads side by side have; `at`: of their room in `shared`."""
        _over_warp(register, min(lanes, _WARP), combine)
        if lanes <= _WARP:
            return
        assert shared is not None
        warps, found = lanes // _WARP, local(1)
        with when(self.lane % _WARP == 0):
            value = tirx.reinterpret("float32", register[0])
            store_shared(shared, at + self.lane // _WARP * 4, value)
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


@dataclass(frozen=True)
class _Quotients:
    """Codes by a scale: x / scale to the last bit, and rounded to an integer, half to even.

    That takes the reciprocal to the last bit, the product with x, and twice the exact rest of the
    quotient so far: Markstein, "Computation of elementary functions on the IBM RISC System/6000"
    (1990), as nvcc divides where it need not call. The rest must not underflow: x and scale of
    small parts are both multiplied by a power of two. Of columns that are not finite the
    scale is NaN.
    """

    scale: tirx.Expr
    divisor: tirx.Expr
    reciprocal: tirx.Expr
    factor: tirx.Expr | None

    @staticmethod
    def by_scale(largest: tirx.Expr, dtype: str) -> _Quotients:
        """From the bits of the largest magnitude of a part of `dtype`; see `activation_scale`."""
        bits = T.Bind(tirx.max(largest, tirx.const(_SMALLEST, "int32")))
        amax = T.Bind(tirx.reinterpret("float32", bits))
        most = tirx.const(LARGEST_CODE, "float32")
        scale = _divide(amax, most, tirx.const(1.0 / LARGEST_CODE, "float32"))
        factor, divisor = None, scale
        if dtype != "float16":  # whose parts are zero or not that small
            one, more = tirx.const(1.0, "float32"), tirx.const(_FACTOR, "float32")
            is_small = amax < tirx.const(_SMALL, "float32")
            factor = T.Bind(T.Select(is_small, more, one))
            divisor = T.Bind(scale * factor)
        return _Quotients(scale, divisor, _reciprocal(divisor), factor)

    def code(self, x: tirx.Expr) -> tirx.Expr:
        """Its code is the lowest byte."""
        x = x if self.factor is None else T.Bind(x * self.factor)
        quotient = _divide(x, self.divisor, self.reciprocal)
        return tirx.reinterpret("uint32", T.Bind(quotient + tirx.const(_VALUE, "float32")))


def _reciprocal(x: tirx.Expr) -> tirx.Expr:
    """Right but for the last bit at most, without a call."""
    registers, one = local(3), tirx.const(1.0, "float32")
    approximate_reciprocal(registers[0], x)
    fused_multiply_add(registers[1], -x, registers[0], one)
    fused_multiply_add(registers[2], registers[0], registers[1], registers[0])
    return registers[2]


def _divide(x: tirx.Expr, divisor: tirx.Expr, reciprocal: tirx.Expr) -> tirx.Expr:
    quotient, rest = local(1), local(1)
    T.buffer_store(quotient, x * reciprocal, [0])
    for _ in range(2):
        fused_multiply_add(rest[0], -divisor, quotient[0], x)
        fused_multiply_add(quotient[0], rest[0], reciprocal, quotient[0])
    return quotient[0]
