"""Vectors of INT4 weights in float32, exactly and without a conversion instruction.

The four bits of a code among the mantissa bits of a power of two are a float32 of their own: where
bit s weighs 1 in a float of magnitude 2**(23 - s), and the code is in bits s…s + 3,

    code - zero == (2**(23 - s) + code) - (2**(23 - s) + zero)

and neither side rounds. Masking two codes of each byte in place takes a shift for every two codes,
a mask and a subtraction for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import LANES, Int4Weight
from ..emit import int64, registers, vectorized
from ..int4_format.packing import CODES_PER_WORD, SYMMETRIC_ZERO
from ..matmul.int4_matmul import nibble

Decode: TypeAlias = Callable[[tirx.Expr], Iterable[tirx.Expr]]
"""The parts of a vector of words."""

ALL_LANES = tirx.Ramp(int64(0), int64(1), LANES)
_IN_PLACE = (0, 4)
"""The first bits of codes that are masked where they are."""


def float32_decoder(weight: Int4Weight, tile: tirx.Expr, group: tirx.Expr) -> Decode:
    """Emits what decoding words of a group takes; decodes to code - zero, in the order of k."""
    zero = zero_points(weight, tile, group)
    offsets = registers(len(_IN_PLACE))
    for bit, offset in zip(_IN_PLACE, offsets, strict=True):
        with vectorized() as lane:
            T.buffer_store(offset, zero(lane).astype("float32") + 2.0 ** (23 - bit), [lane])

    def decode(words: tirx.Expr) -> Iterable[tirx.Expr]:
        for shift in range(0, 32, 8):
            byte = words >> same(shift)
            for bit, offset in zip(_IN_PLACE, offsets, strict=True):
                power = same((127 + 23 - bit) << 23)
                biased = tirx.reinterpret(f"float32x{LANES}", byte & same(15 << bit) | power)
                yield biased - offset[ALL_LANES]

    return decode


def zero_points(
    weight: Int4Weight, tile: tirx.Expr, group: tirx.Expr
) -> Callable[[tirx.Expr], tirx.Expr]:
    """The zero points of a group as integers, by lane."""
    if weight.zero_point is None:
        return lambda lane: tirx.const(SYMMETRIC_ZERO, "int32")
    part = weight.zero_point
    return lambda lane: nibble(part[tile, group // CODES_PER_WORD, lane], group % CODES_PER_WORD)


def same(value: int) -> tirx.Expr:
    """A vector of one value for words of codes."""
    return tirx.Broadcast(tirx.const(value, "uint32"), LANES)
