"""Vectors of INT4 weights in float32, exactly and without a conversion instruction.

The four bits of a code in the low mantissa bits of 2**23 are the float 2**23 + code, so

    code - zero == reinterpret(0x4B000000 | code) - (2**23 + zero)

and neither side rounds: two integer instructions and one subtraction per vector.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from .contraction import Int4Weight
from .emit import registers, vectorized
from .int4_matmul import nibble
from .packing import CODES_PER_WORD, SYMMETRIC_ZERO

_MAGIC_BITS = 0x4B000000
_MAGIC = float(1 << 23)


def biased_code(word: tirx.Expr, nibble: tirx.Expr | int) -> tirx.Expr:
    """2**23 + the code in a nibble of `word`."""
    shift = tirx.const(4 * nibble, "uint32") if isinstance(nibble, int) else 4 * nibble
    code = (word >> shift) & tirx.const(15, "uint32")
    return tirx.reinterpret("float32", code | tirx.const(_MAGIC_BITS, "uint32"))


def decode_group(
    weight: Int4Weight, tile: tirx.Expr, group: tirx.Expr
) -> tuple[tirx.Buffer, tirx.Buffer]:
    """Emit loads of the scales and of 2**23 + the zero points of a group, 16 channels each."""
    scale, offset = registers(2)
    with vectorized() as lane:
        T.buffer_store(scale, weight.scale[tile, group, lane].astype("float32"), [lane])
        T.buffer_store(offset, _biased_zero(weight, tile, group, lane), [lane])
    return scale, offset


def _biased_zero(
    weight: Int4Weight, tile: tirx.Expr, group: tirx.Expr, lane: tirx.Expr
) -> tirx.Expr:
    if weight.zero_point is None:
        return tirx.const(_MAGIC + 8, "float32")
    word = weight.zero_point[tile, group // CODES_PER_WORD, lane]
    return biased_code(word, (group % CODES_PER_WORD).astype("uint32"))


def zero_points(
    weight: Int4Weight, tile: tirx.Expr, group: tirx.Expr
) -> Callable[[tirx.Expr], tirx.Expr]:
    """The zero points of a group as integers, by lane."""
    if weight.zero_point is None:
        return lambda lane: tirx.const(SYMMETRIC_ZERO, "int32")
    part = weight.zero_point
    return lambda lane: nibble(part[tile, group // CODES_PER_WORD, lane], group)
