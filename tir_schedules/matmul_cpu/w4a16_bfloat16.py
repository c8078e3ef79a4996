"""The arithmetic of bfloat16 activations times INT4 weights, where a CPU multiplies pairs of them.

Code minus zero point is an integer of -15…15, which a table turns into a bfloat16, exactly. Nibbles
t and t + 4 of a word are the low bits of its halves after one shift: they make a pair, and so do
the activations that meet them. The instruction, vdpbf16ps, takes denormal numbers for zero and
gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import LANES, Contraction
from ..cpu.compute_bfloat16 import bfloat16_bits
from ..emit import Loop, int64, serial, vectorized
from ..int4_format.packing import CODES_PER_WORD
from .int4_arithmetic import FloatArithmetic, Row
from .int4_decode import ALL_LANES, Decode, same, zero_points

_PAIRS = CODES_PER_WORD // 2
_LOW_NIBBLES = 0x000F000F
_TWICE = 0x00010001
_INTEGERS = ", ".join(f"bfloat {value}.0" for value in (*range(16), *range(-16, 0)))

LLVM = f"""
define linkonce_odr <16 x i32> @sits_bfloat16_difference(<16 x i32> %a, <16 x i32> %b) alwaysinline
{{
  %x = bitcast <16 x i32> %a to <32 x i16>
  %y = bitcast <16 x i32> %b to <32 x i16>
  %d = sub <32 x i16> %x, %y
  %t = bitcast <32 x bfloat> <{_INTEGERS}> to <32 x i16>
  %v = call <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16> %t, <32 x i16> %d)
  %r = bitcast <32 x i16> %v to <16 x i32>
  ret <16 x i32> %r
}}
define linkonce_odr <16 x float> @sits_bfloat16_dot(
    <16 x float> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline
{{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""
"""a - b of pairs of codes as bfloat16, and c + a . b of pairs of bfloat16: TVM has no vectors of
bfloat16, so pairs travel as int32. The table is read at the low 5 bits of its index."""


class Bfloat16Arithmetic(FloatArithmetic):
    """Two products at a time."""

    parts, dtype = _PAIRS, "int32"

    @staticmethod
    def copy(product: Contraction, loop: Loop) -> tirx.Buffer:
        """The left operand (row, pair)."""
        return _pairs(product, loop)

    def activation(self, row: Row, word: tirx.Expr, part: int) -> tirx.Expr:
        return self.x[(*row, word * _PAIRS + part)]

    def decoder(self, tile: tirx.Expr, group: tirx.Expr) -> Decode:
        zero = zero_points(self.weight, tile, group)
        zeros = T.alloc_buffer((int64(LANES),), "int32", scope="local")
        with vectorized() as lane:
            T.buffer_store(zeros, zero(lane) * _TWICE, [lane])
        pairs = zeros[ALL_LANES]

        def decode(words: tirx.Expr) -> Iterable[tirx.Expr]:
            for t in range(_PAIRS):
                codes = (words >> same(4 * t)) & same(_LOW_NIBBLES)
                codes = tirx.reinterpret("int32x16", codes)
                yield T.Bind(tirx.call_extern("int32x16", "sits_bfloat16_difference", codes, pairs))

        return decode

    def add(self, sums: tirx.Expr, part: tirx.Expr, activation: tirx.Expr) -> tirx.Expr:
        return tirx.call_extern("float32x16", "sits_bfloat16_dot", sums, part, activation)


def _pairs(product: Contraction, loop: Loop) -> tirx.Buffer:
    """The left operand (row, pair), zero from k on, where codes are padding."""
    depth, words = product.reduction.dom.extent, product.padded_k // CODES_PER_WORD
    pairs = T.alloc_buffer((product.rows.extent, words * _PAIRS), "int32")
    whole = depth // CODES_PER_WORD
    with loop(product.rows.extent) as row:
        at = product.rows.at(row)

        def left(k: tirx.Expr) -> tirx.Expr:
            return product.left({**at, product.reduction.var: k})

        def left_or_zero(k: tirx.Expr) -> tirx.Expr:
            return tirx.if_then_else(k < depth, left(k), tirx.const(0, "float32"))

        def copy(word: tirx.Expr, t: tirx.Expr, read: Callable[[tirx.Expr], tirx.Expr]) -> None:
            k = word * CODES_PER_WORD + t
            low, high = (
                bfloat16_bits(T.Bind(read(half))).astype("uint32") for half in (k, k + _PAIRS)
            )
            pair = tirx.reinterpret("int32", low | high << tirx.const(16, "uint32"))
            T.buffer_store(pairs, pair, [row, word * _PAIRS + t])

        with serial(whole) as word, vectorized(_PAIRS) as t:
            copy(word, t, left)
        with serial(words - whole) as rest, serial(_PAIRS) as t:
            copy(whole + rest, t, left_or_zero)
    return pairs
