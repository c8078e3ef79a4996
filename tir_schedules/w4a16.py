"""The arithmetic of float32 activations times INT4 weights, without a conversion instruction.

The four bits of a code among the mantissa bits of a power of two are a float32 of their own: where
bit s weighs 1 in a float of magnitude 2**(23 - s), and the code is in bits s…s + 3,

    code - zero == (2**(23 - s) + code) - (2**(23 - s) + zero)

and neither side rounds. Masking two codes of each byte in place takes a shift for every two codes,
a mask and a subtraction for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from .contraction import LANES, Contraction, Int4Weight
from .emit import Loop, int64, registers, scratch, serial, vectorized
from .int4_arithmetic import Decode, Row, same
from .int4_decode import zero_points
from .packing import CODES_PER_WORD

_IN_PLACE = (0, 4)
"""The first bits of codes that are masked where they are."""


class Float32Arithmetic:
    """One code at a time; copies the activations, in a `loop` over rows."""

    lanes, parts, dtype = LANES, CODES_PER_WORD, "float32"

    def __init__(self, product: Contraction, loop: Loop) -> None:
        assert isinstance(product.rhs, Int4Weight)
        self.weight = product.rhs
        self.x = _padded_rows(product, loop)

    def row(self, index: tirx.Expr) -> Row:
        return [T.Bind(index)]

    def activation(self, row: Row, word: tirx.Expr, part: int) -> tirx.Expr:
        return self.x[(*row, word * CODES_PER_WORD + part)]

    def start(
        self, rows: Sequence[Row], at: Sequence[tirx.Expr], group: tirx.Expr
    ) -> list[list[tirx.Buffer]]:
        return [registers(len(at)) for _ in rows]

    def decoder(self, tile: tirx.Expr, group: tirx.Expr) -> Decode:
        zero = zero_points(self.weight, tile, group)
        offsets = registers(len(_IN_PLACE))
        for bit, offset in zip(_IN_PLACE, offsets, strict=True):
            with vectorized() as lane:
                T.buffer_store(offset, zero(lane).astype("float32") + 2.0 ** (23 - bit), [lane])

        def decode(words: tirx.Expr) -> Iterable[tirx.Expr]:
            for shift in range(0, 32, 8):
                byte = words >> same(shift)
                for bit, offset in zip(_IN_PLACE, offsets, strict=True):
                    power = same((127 + 23 - bit) << 23)
                    biased = tirx.reinterpret("float32x16", byte & same(15 << bit) | power)
                    yield biased - offset[tirx.Ramp(int64(0), int64(1), LANES)]

        return decode

    def scale(self, row: Row, group: tirx.Expr) -> None:
        return None

    def add(self, sums: tirx.Expr, part: tirx.Expr, activation: tirx.Expr) -> tirx.Expr:
        return sums + part * activation


def _padded_rows(product: Contraction, loop: Loop) -> tirx.Buffer:
    """The left operand (row, k), zero from k on, where codes are padding."""
    depth, padded = product.reduction.dom.extent, product.padded_k
    x = scratch(product.rows.extent, padded)
    with loop(product.rows.extent) as row:
        at = product.rows.at(row)
        with serial(depth) as k:
            T.buffer_store(x, product.left({**at, product.reduction.var: k}), [row, k])
        with serial(padded - depth) as rest:
            T.buffer_store(x, tirx.const(0, "float32"), [row, depth + rest])
    return x
