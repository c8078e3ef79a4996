"""The products of the CUDA attention kernel on scalar units, of float32.

Tensor cores would round float32 operands to 11 bits (TF32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import from_lane_of_quad, load_words, local, store_words
from .cuda_products import Products


@dataclass(frozen=True)
class ScalarProducts(Products):
    """A lane reads four neighbours of an operand at once, 16 bytes: the eight rows, four keys or
    four runs of values that a warp reads together lie in different banks.
    """

    neighbours: ClassVar[int] = 4

    def score(self, scores: tirx.Buffer) -> None:
        block, tiling = self.block, self.block.tiling
        queries, keys = local(8), local(4)
        with T.unroll(tiling.keys // 2) as i:
            T.buffer_store(scores, tirx.const(0.0, "float32"), [i])
        with T.serial(tiling.width // 4) as step:
            for half in range(2):
                row = block.warp * 16 + block.lane // 4 + half * 8
                load_words(queries, half * 4, block.shared, row * tiling.pitch + step * 4)
            with T.unroll(tiling.keys // 8) as n, T.unroll(2) as e:
                key = n * 8 + block.lane % 4 * 2 + e
                at = key * tiling.pitch + step * 4 + tiling.first_key
                load_words(keys, 0, block.shared, at)
                with T.unroll(2) as half, T.unroll(4) as i:
                    _add_product(scores, n * 4 + half * 2 + e, queries[half * 4 + i], keys[i])

    def accumulate(self, weights: tirx.Buffer) -> None:
        """A quad of lanes has the weights of a row: each key's from the lane that has it."""
        block, tiling = self.block, self.block.tiling
        weight, values = local(2), local(4)
        with T.unroll(tiling.keys // 8) as step, T.unroll(4) as lane, T.unroll(2) as e:
            for half in range(2):
                own = weights[step * 4 + half * 2 + e]
                T.buffer_store(weight, from_lane_of_quad(own, lane), [half])
            with T.unroll(tiling.value_width // 16) as n:
                key, column = step * 8 + lane * 2 + e, n * 16 + block.lane % 4 * 4
                at = key * tiling.value_pitch + column + tiling.first_value
                load_words(values, 0, block.shared, at)
                with T.unroll(2) as half, T.unroll(4) as i:
                    _add_product(self.results, n * 8 + half * 4 + i, weight[half], values[i])

    def store_values(self, address: tirx.Expr, values: list[tirx.Expr]) -> None:
        store_words(address, values)


def _add_product(buffer: tirx.Buffer, at: tirx.Expr, left: tirx.Expr, right: tirx.Expr) -> None:
    T.buffer_store(buffer, buffer[at] + left * right, [at])
