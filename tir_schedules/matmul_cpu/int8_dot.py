"""Four products of an unsigned and a signed byte, added to each int32 lane of a vector.

By what the CPU has; all are exact, because codes of INT4 weights are 15 at most: the two products
that VPMADDUBSW adds stay below 2 * 15 * 127, far from where it saturates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.target import Target

from ..cpu_target import has_feature

_PLAIN_LANES = 16
Vector: TypeAlias = tirx.Expr
Add: TypeAlias = Callable[[Vector, Vector, Vector], Vector]


@dataclass(frozen=True)
class Int8Dot:
    """``add(sums, codes, activations)``, each `lanes` of int32; the latter two hold four bytes."""

    lanes: int
    add: Add


def int8_dot(target: Target) -> Int8Dot:
    """The best instructions that an llvm target has for it."""
    if has_feature("avx512vnni", target):
        return Int8Dot(16, _call("llvm.x86.avx512.vpdpbusd.512", 16))
    if has_feature("avx512bw", target):
        return Int8Dot(
            16, _multiply_add(16, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
        )
    if has_feature("avxvnni", target):
        return Int8Dot(8, _call("llvm.x86.avx512.vpdpbusd.256", 8))
    if has_feature("avx2", target):
        return Int8Dot(8, _multiply_add(8, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"))
    if has_feature("dotprod", target):
        return Int8Dot(4, _call("llvm.aarch64.neon.sdot.v4i32.v16i8", 4))
    return Int8Dot(_PLAIN_LANES, _shift_and_multiply)


def _call(name: str, lanes: int) -> Add:
    def add(sums: Vector, codes: Vector, activations: Vector) -> Vector:
        operands = [_bytes(codes, lanes), _bytes(activations, lanes)]
        return tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, sums, *operands)

    return add


def _multiply_add(lanes: int, bytes_to_words: str, words_to_ints: str) -> Add:
    def add(sums: Vector, codes: Vector, activations: Vector) -> Vector:
        operands = [_bytes(codes, lanes), _bytes(activations, lanes)]
        words = tirx.call_llvm_pure_intrin(f"int16x{2 * lanes}", bytes_to_words, *operands)
        ones = tirx.Broadcast(tirx.const(1, "int16"), 2 * lanes)
        return sums + tirx.call_llvm_pure_intrin(f"int32x{lanes}", words_to_ints, words, ones)

    return add


def _bytes(vector: Vector, lanes: int) -> Vector:
    return tirx.reinterpret(f"int8x{4 * lanes}", vector)


def _shift_and_multiply(sums: Vector, codes: Vector, activations: Vector) -> Vector:
    for byte in range(4):
        sums = sums + _byte(codes, byte) * _byte(activations, byte)
    return sums


def _byte(vector: Vector, index: int) -> Vector:
    """A byte of each lane, sign-extended; codes are 15 at most and have no sign."""
    return vector << _all(24 - 8 * index) >> _all(24)


def _all(value: int) -> Vector:
    return tirx.Broadcast(tirx.const(value, "int32"), _PLAIN_LANES)
