"""The arithmetic of float32 activations times INT4 weights, one code at a time."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import Contraction
from ..emit import Loop, scratch, serial
from ..int4_format.packing import CODES_PER_WORD
from .int4_arithmetic import FloatArithmetic, Row
from .int4_decode import Decode, float32_decoder


class Float32Arithmetic(FloatArithmetic):
    """See `int4_decode`."""

    parts, dtype = CODES_PER_WORD, "float32"

    @staticmethod
    def copy(product: Contraction, loop: Loop) -> tirx.Buffer:
        """The left operand (row, k)."""
        depth, padded = product.reduction.dom.extent, product.padded_k
        x = scratch(product.rows.extent, padded)
        with loop(product.rows.extent) as row:
            at = product.rows.at(row)
            with serial(depth) as k:
                T.buffer_store(x, product.left({**at, product.reduction.var: k}), [row, k])
            with serial(padded - depth) as rest:
                T.buffer_store(x, tirx.const(0, "float32"), [row, depth + rest])
        return x

    def activation(self, row: Row, word: tirx.Expr, part: int) -> tirx.Expr:
        return self.x[(*row, word * CODES_PER_WORD + part)]

    def decoder(self, tile: tirx.Expr, group: tirx.Expr) -> Decode:
        return float32_decoder(self.weight, tile, group)

    def add(self, sums: tirx.Expr, part: tirx.Expr, activation: tirx.Expr) -> tirx.Expr:
        return sums + part * activation
