"""The arithmetic of INT8 activations times INT4 weights, see `int8_matmul`.

A word decodes to its even and its odd codes, four bytes each; sums of a group are int32 and start
at -zero point * sum of the activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import LANES, Contraction, Int4Weight, Int8Rows
from ..emit import Loop, int64, vectorized
from .int4_arithmetic import Row
from .int4_decode import Decode, zero_points
from .int8_dot import Int8Dot

_NIBBLES = 0x0F0F0F0F


class Int8Arithmetic:
    """Products of bytes, four at a time."""

    parts, dtype = 2, "int32"

    def __init__(self, product: Contraction, _loop: Loop, dot: Int8Dot) -> None:
        assert isinstance(product.lhs, Int8Rows)
        assert isinstance(product.rhs, Int4Weight)
        self.rows, self.x, self.weight = product.rows, product.lhs, product.rhs
        self.lanes, self.add = dot.lanes, dot.add
        self.groups_per_scale = product.lhs.groups_per_scale

    def row(self, index: tirx.Expr) -> Row:
        return [T.Bind(axis) for axis in self.rows.indices(T.Bind(index))]

    def activation(self, row: Row, word: tirx.Expr, part: int) -> tirx.Expr:
        return self.x.codes[(*row, word * 2 + part)]

    def decoder(self, tile: tirx.Expr, group: tirx.Expr) -> Decode:
        return self._nibbles

    def start(
        self, rows: Sequence[Row], at: Sequence[tirx.Expr], group: tirx.Expr
    ) -> list[list[tirx.Buffer]]:
        zeros = [zero_points(self.weight, tile, group) for tile in at]
        sums = []
        for row in rows:
            x_sum = T.Bind(-self.x.sums[(*row, group)])
            sums.append([T.alloc_buffer((int64(LANES),), "int32", scope="local") for _ in at])
            for buffer, zero in zip(sums[-1], zeros, strict=True):
                with vectorized() as lane:
                    T.buffer_store(buffer, zero(lane) * x_sum, [lane])
        return sums

    def scale(self, row: Row, index: tirx.Expr) -> tirx.Expr:
        return T.Bind(self.x.scale[(*row, index)])

    def _nibbles(self, words: tirx.Expr) -> Iterable[tirx.Expr]:
        """The even and the odd codes of words."""
        four, mask = (
            tirx.Broadcast(tirx.const(value, "uint32"), self.lanes) for value in (4, _NIBBLES)
        )
        for half in (words, words >> four):
            yield T.Bind(tirx.reinterpret(f"int32x{self.lanes}", half & mask))
