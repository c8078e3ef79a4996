"""The llvm schedule of every matrix product: GEMV for one row, register-tiled GEMM for more."""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target
from tvm.tirx.script import builder as T

from .contraction import LANES, Contraction, Int4Weight, Int8Rows
from .cpu_target import cores, vector_lanes
from .emit import with_emitted_body
from .gemm import Tile, gemm
from .gemv import Streams, gemv
from .int8_dot import int8_dot
from .recognise import recognise
from .w4a8 import Int8Kernel, Int8Tile, w4a8

_PANEL_BYTES = 1 << 20
"""Half of a usual L2 cache."""

_WIDEST_PANEL, _SYMBOLIC_PANEL = 8, 4
"""Vectors of 16 columns in a panel at most, and where k is symbolic."""


class Matmul(ScheduleRule):
    """Schedule matmul, its transposed and batched forms, and INT4 matmul, with fused epilogues.

    One function serves every number of rows: if the number is symbolic, it is looked at when the
    function runs. Products are float32 sums whatever the operands are. Functions that are no matrix
    product of float16 or float32 operands are left to other rules.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None if it is not for this rule (or `tunable`)."""
        if target.kind.name != "llvm" or tunable:
            return None
        product = recognise(func)
        if product is None:
            return None
        return s_tir.Schedule(with_emitted_body(func, lambda: _any_rows(product, target)))


def _any_rows(product: Contraction, target: Target) -> None:
    if isinstance(product.lhs, Int8Rows):
        assert isinstance(product.rhs, Int4Weight)
        w4a8(product, int8_dot(target), _int8_kernel(product.rhs, target))
        return
    one = tvm.sym.Analyzer().simplify(product.rows.extent == 1)
    if isinstance(one, tirx.IntImm):  # static rows, or 2 n, which is never 1
        _few_or_many(product, target, bool(one.value))
        return
    with T.If(one):
        with T.Then():
            _few_or_many(product, target, True)
        with T.Else():
            _few_or_many(product, target, False)


def _few_or_many(product: Contraction, target: Target, one: bool) -> None:
    if one:
        gemv(product, _streams(target))
    else:
        gemm(product, _tile(product, target))


def _tile(product: Contraction, target: Target) -> Tile:
    rows, vectors = {16: (12, 2), 8: (6, 1), 4: (3, 1)}[vector_lanes(target)]
    depth, columns = product.padded_k, product.column.dom.extent
    fits = _SYMBOLIC_PANEL
    if isinstance(depth, tirx.IntImm):
        fits = min(_WIDEST_PANEL, _PANEL_BYTES // (4 * LANES * max(1, depth.value)))
    widths = range(vectors, max(vectors, fits) + 1, vectors)
    if not isinstance(columns, tirx.IntImm):
        return Tile(rows, vectors, widths[-1])
    return Tile(rows, vectors, _balanced(-(-columns.value // LANES), widths, cores(target)))


def _balanced(columns: int, widths: range, cores: int) -> int:
    """The width of panels that leaves the busiest core the fewest columns; the widest of equals."""

    def columns_of_busiest(width: int) -> int:
        panels = -(-columns // width)
        return -(-panels // cores) * width

    return min(reversed(widths), key=columns_of_busiest)


def _int8_kernel(weight: Int4Weight, target: Target) -> Int8Kernel:
    """Tiles whose integer and float sums fit the vector registers together."""
    rows, vectors = {16: (3, 4), 8: (2, 1), 4: (1, 1)}[vector_lanes(target)]
    one = Int8Tile(1, max(vectors, 2))
    tasks = _even_tasks(int(weight.codes.shape[0]), one.vectors, cores(target))
    few, many = (Int8Tile(rows, vectors, words) for words in (2, 4))
    return Int8Kernel(one, few, 32, many, 4, tasks)


def _even_tasks(tiles: int, streams: int, cores: int) -> int:
    """A few tasks for each core, such that all have about the same number of tiles."""

    def places(tasks: int) -> int:
        return -(-tiles // (tasks * streams)) * tasks * streams

    return min((4 * cores, 2 * cores, cores), key=places)


def _streams(target: Target) -> Streams:
    lanes = vector_lanes(target)
    return {16: Streams(4, 8, 16), 8: Streams(2, 4, 4), 4: Streams(1, 2, 2)}[lanes]
