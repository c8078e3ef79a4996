"""The products of the CUDA attention kernel on tensor cores, of float16 and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import (
    load_matrices,
    local,
    multiply_add,
    pack,
    store_word,
    wait_for_copies,
)
from .cuda_block import Block
from .cuda_products import Products


@dataclass(frozen=True)
class TensorCoreProducts(Products):
    """`queries` are all those of this warp where they fit, else 16 of the head's dimensions."""

    neighbours: ClassVar[int] = 2

    queries: tirx.Buffer

    @classmethod
    def allocate(cls, block: Block) -> Self:
        count = block.tiling.width // 4 if block.tiling.holds_queries else 4
        results = local(block.tiling.value_width // 2, value=0.0)
        return cls(block, results, local(count, "uint32"))

    def prepare(self) -> None:
        if self.block.tiling.holds_queries:
            wait_for_copies()
            with T.unroll(self.block.tiling.width // 16) as step:
                self._load_query(step * 4, step)

    def _load_query(self, at: tirx.Expr | int, step: tirx.Expr) -> None:
        """16 of the head's dimensions of this warp's rows, as a left factor."""
        block = self.block
        row, column = block.warp * 16 + block.lane % 16, step * 16 + block.lane // 16 * 8
        load_matrices(self.queries, at, block.shared, (row * block.tiling.pitch + column) * 2)

    def score(self, scores: tirx.Buffer) -> None:
        keys, lane, tiling = local(4, "uint32"), self.block.lane, self.block.tiling
        with T.unroll(tiling.keys // 2) as i:
            T.buffer_store(scores, tirx.const(0.0, "float32"), [i])
        with T.unroll(tiling.width // 16) as step:
            first = step * 4 if tiling.holds_queries else 0
            if not tiling.holds_queries:
                self._load_query(first, step)
            with T.unroll(tiling.keys // 16) as n:
                key, column = n * 16 + lane // 16 * 8 + lane % 8, step * 16 + lane // 8 % 2 * 8
                at = key * tiling.pitch + column + tiling.first_key
                load_matrices(keys, 0, self.block.shared, at * 2)
                self._multiply_pair(scores, n, [self.queries[first + i] for i in range(4)], keys)

    def accumulate(self, weights: tirx.Buffer) -> None:
        """The weights of 16 keys, as `mma` left them, are a left factor."""
        packed, values = local(4, "uint32"), local(4, "uint32")
        lane, tiling, dtype = self.block.lane, self.block.tiling, self.block.spec.dtype
        with T.unroll(tiling.keys // 16) as step:
            for i in range(4):
                pack(packed[i], weights[step * 8 + 2 * i], weights[step * 8 + 2 * i + 1], dtype)
            with T.unroll(tiling.value_width // 16) as n:
                key, column = step * 16 + lane % 16, n * 16 + lane // 16 * 8
                at = key * tiling.value_pitch + column + tiling.first_value
                load_matrices(values, 0, self.block.shared, at * 2, transposed=True)
                self._multiply_pair(self.results, n, [packed[i] for i in range(4)], values)

    def _multiply_pair(
        self, product: tirx.Buffer, n: tirx.Expr, left: list[tirx.Expr], right: tirx.Buffer
    ) -> None:
        """Columns 16 n to 16 n + 15 of a product, of two right factors in four registers."""
        for i in range(2):
            factor = [right[2 * i], right[2 * i + 1]]
            multiply_add(product, n * 8 + i * 4, left, factor, self.block.spec.dtype)

    def store_values(self, address: tirx.Expr, values: list[tirx.Expr]) -> None:
        packed, (lower, upper) = local(1, "uint32"), values
        pack(packed[0], lower, upper, self.block.spec.dtype)
        store_word(address, packed[0])
