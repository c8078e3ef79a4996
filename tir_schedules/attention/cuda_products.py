"""What both forms of the two products of the CUDA attention kernel have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import local
from ..emit import when
from .cuda_block import Block
from .cuda_softmax import Softmax


@dataclass(frozen=True)
class Products(ABC):
    """Scores of a tile, and the results of this lane, which it keeps.

    Of its two rows a lane has `neighbours` values side by side in every 4 · `neighbours`:
    ``results[(2 n + half) neighbours + e]`` is column 4 · `neighbours` n + `neighbours` (lane % 4)
    + e.
    """

    neighbours: ClassVar[int]

    block: Block
    results: tirx.Buffer

    @classmethod
    def allocate(cls, block: Block) -> Self:
        return cls(block, local(block.tiling.value_width // 2, value=0.0))

    def prepare(self) -> None:  # noqa: B027  most have nothing to do
        """Read what does not change from tile to tile. Copies of queries may still be pending."""

    @abstractmethod
    def score(self, scores: tirx.Buffer) -> None:
        """scores = q kᵀ of the tile in shared memory, laid out as `Softmax` wants it."""

    @abstractmethod
    def accumulate(self, weights: tirx.Buffer) -> None:
        """results += weights · v of the tile in shared memory."""

    @abstractmethod
    def store_values(self, address: tirx.Expr, values: list[tirx.Expr]) -> None:
        """Write values that lie side by side, from `address` on, as the kernel's dtype."""

    def decay(self, factor: tirx.Buffer) -> None:
        """Multiply the results of each row by its factor."""
        with self._runs() as (first, half, _), T.unroll(self.neighbours) as e:
            value = self.results[first + e] * factor[half]
            T.buffer_store(self.results, value, [first + e])

    def store(self, softmax: Softmax) -> None:
        """Write the results of rows and columns that there are, divided by their sums."""
        block, width = self.block, self.block.spec.value_dim
        piece = math.gcd(self.neighbours, width)
        with self._runs() as (first, half, column), when(block.row(half) < block.num_rows):
            head, query = block.head_and_query(block.row(half))
            for i in range(0, self.neighbours, piece):
                elements = [self.results[first + i + e] for e in range(piece)]
                at = [block.batch, head, query, T.Cast("int64", column + i)]
                with when(block.tiling.value_width == width or column + i < width):
                    values = [softmax.normalized(element, half) for element in elements]
                    self.store_values(T.address_of(block.spec.out[tuple(at)]), values)

    @contextmanager
    def _runs(self) -> Iterator[tuple[tirx.Expr, tirx.Expr, tirx.Expr]]:
        """Index in `results`, row and column of the first of each `neighbours`."""
        side = self.neighbours
        with T.unroll(2) as half, T.unroll(self.block.tiling.value_width // (4 * side)) as n:
            yield (2 * n + half) * side, half, 4 * side * n + self.block.lane % 4 * side
