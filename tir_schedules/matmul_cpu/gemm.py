"""Register-tiled matrix product for many rows.

Loop nest: tasks run in parallel, one per panel of the right operand::

    for task in parallel(batches * ceil(n / panel)):
        pack (or dequantize) the panel into [panel / 16, k, 16] float32     # stays in L2
        for i in range(ceil(m / rows)):
            for j in range(panel / (16 * vectors)):
                rows x vectors accumulators of 16 lanes, in registers
                for k: accumulators += lhs[i, k] * panel[j, k, :]
                epilogue and store
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import Contraction, Int4Weight, Point, split
from ..emit import (
    LANES,
    ceildiv,
    int64,
    parallel,
    registers,
    scratch,
    serial,
    store_columns,
    vectorized,
)
from ..int4_format.packing import CODES_PER_WORD
from .int4_decode import ALL_LANES, float32_decoder

ReadLeft: TypeAlias = Callable[[Point, tirx.Expr, tirx.Expr], tirx.Expr]
"""lhs at (batch, row, k)."""


@dataclass(frozen=True)
class Tile:
    """Sizes of the register tile, rows x (16 * vectors), and of the panel, in vectors of 16."""

    rows: int
    vectors: int
    panel: int


def gemm(product: Contraction, tile: Tile) -> None:
    """Emit the product for any number of rows."""
    rows, columns = product.rows.extent, product.column.dom.extent
    panels = ceildiv(columns, tile.panel * LANES)
    left = _left_operand(product)
    with parallel(product.batch.extent * panels) as task:
        outer, inner = split(task, panels)
        batch, first = product.batch.at(outer), T.Bind(inner * (tile.panel * LANES))
        panel = scratch(tile.panel, product.padded_k, LANES)
        result = scratch(tile.rows, tile.vectors * LANES)
        _pack(product, batch, first, panel)
        width = tile.vectors * LANES
        with (
            serial(ceildiv(rows, tile.rows)) as i,
            serial(
                tirx.min(int64(tile.panel * LANES // width), ceildiv(columns - first, width))
            ) as j,
        ):
            row, column = i * tile.rows, first + j * width
            _multiply(product, tile, left, (batch, row), (panel, j * tile.vectors), result)
            height = tirx.min(rows - row, int64(tile.rows))
            vectors = tirx.min(ceildiv(columns - column, LANES), int64(tile.vectors))
            with serial(height) as r, serial(vectors) as v:
                point = {**batch, **product.rows.at(row + r)}
                store_columns(product, point, column + v * LANES, result, [r, v * LANES])


def _multiply(
    product: Contraction,
    tile: Tile,
    left: ReadLeft,
    where: tuple[Point, tirx.Expr],
    right: tuple[tirx.Buffer, tirx.Expr],
    result: tirx.Buffer,
) -> None:
    """result[i, :] = sum over k of lhs[row + i, k] * panel[vector…, k, :]; rows beyond repeat."""
    (batch, row), (panel, vector) = where, right
    last = product.rows.extent - 1
    at = [T.Bind(tirx.min(row + i, last)) for i in range(tile.rows)]
    sums = [registers(tile.vectors) for _ in at]
    with serial(product.reduction.dom.extent) as depth:
        for i, accumulators in zip(at, sums, strict=True):
            x = T.Bind(left(batch, i, depth))
            for v, acc in enumerate(accumulators):
                with vectorized() as lane:
                    weight = panel[vector + v, depth, lane]
                    T.buffer_store(acc, acc[lane] + x * weight, [lane])
    for i, accumulators in enumerate(sums):
        for v, acc in enumerate(accumulators):
            with vectorized() as lane:
                T.buffer_store(result, acc[lane], [int64(i), v * LANES + lane])


def _left_operand(product: Contraction) -> ReadLeft:
    """How to read lhs[batch, row, k]; converted to float32 once if it is anything but a load."""
    k = product.reduction

    def read(batch: Point, row: tirx.Expr, depth: tirx.Expr) -> tirx.Expr:
        return product.left({**batch, **product.rows.at(row), k.var: depth})

    if product.left_is_plain:
        return read
    batches, rows = product.batch.extent, product.rows.extent
    copy = scratch(batches, rows, k.dom.extent)  # not flat: TVM would divide by symbolic rows
    with parallel(batches * rows) as r:
        outer, row = split(r, rows)
        batch = product.batch.at(outer)
        whole = k.dom.extent // LANES
        with serial(whole) as block, vectorized() as lane:
            depth = block * LANES + lane
            T.buffer_store(copy, read(batch, row, depth), [outer, row, depth])
        with serial(k.dom.extent - whole * LANES) as rest:
            depth = whole * LANES + rest
            T.buffer_store(copy, read(batch, row, depth), [outer, row, depth])
    return lambda batch, row, depth: copy[product.batch.index(batch), row, depth]


def _pack(product: Contraction, batch: Point, first: tirx.Expr, panel: tirx.Buffer) -> None:
    if isinstance(product.rhs, Int4Weight):
        _pack_int4(product.rhs, first, panel)
    else:
        _pack_float(product, batch, first, panel)


def _pack_float(product: Contraction, batch: Point, first: tirx.Expr, panel: tirx.Buffer) -> None:
    """Copy rhs[first + 16 v + lane, k] to panel[v, k, lane]; beyond the last column, repeat it."""
    columns, k = product.column.dom.extent, product.reduction

    def copy(v: tirx.Expr, depth: tirx.Expr, lane: tirx.Expr, column: tirx.Expr) -> None:
        point = {**batch, product.column.var: column, k.var: depth}
        T.buffer_store(panel, product.right(point), [v, depth, lane])

    def clamped(v: tirx.Expr, depth: tirx.Expr, lane: tirx.Expr) -> None:
        copy(v, depth, lane, tirx.min(first + v * LANES + lane, columns - 1))

    with serial(tirx.min(panel.shape[0], ceildiv(columns - first, LANES))) as v:
        if not product.right_runs_along_columns:
            whole = k.dom.extent // LANES
            with serial(whole) as block, serial(LANES) as lane, serial(LANES) as d:
                clamped(v, block * LANES + d, lane)
            with serial(k.dom.extent - whole * LANES) as d, serial(LANES) as lane:
                clamped(v, whole * LANES + d, lane)
            return
        with T.If(first + (v + 1) * LANES <= columns):
            with T.Then(), serial(k.dom.extent) as depth, vectorized() as lane:
                copy(v, depth, lane, first + v * LANES + lane)
            with T.Else(), serial(k.dom.extent) as depth, serial(LANES) as lane:
                clamped(v, depth, lane)


def _pack_int4(weight: Int4Weight, first: tirx.Expr, panel: tirx.Buffer) -> None:
    tiles, words, _ = weight.codes.shape
    per_group = weight.group_size // CODES_PER_WORD
    with (
        serial(tirx.min(panel.shape[0], tiles - first // LANES)) as v,
        serial(words // per_group) as group,
    ):
        tile = T.Bind(first // LANES + v)
        decode = float32_decoder(weight, tile, group)
        scale = T.Bind(weight.scale[tile, group, ALL_LANES].astype(f"float32x{LANES}"))
        with serial(per_group) as w:
            word = T.Bind(group * per_group + w)
            for part, level in enumerate(decode(T.Bind(weight.codes[tile, word, ALL_LANES]))):
                at = [v, word * CODES_PER_WORD + part, ALL_LANES]
                T.buffer_store(panel, level * scale, at)
