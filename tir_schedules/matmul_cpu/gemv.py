"""Matrix product for one row: every weight is read once, so memory sets the pace.

Two loop nests, by how the right operand lies in memory; in each, tasks run in parallel over the
columns and the sums stay in registers. For INT4 see `int4_tiles`.

- rows of k (``[n, k]``): 16 partial sums along k for each of a few columns, added up at the end.
- rows of n (``[k, n]``): lanes are columns; many vectors at a time, to read long pieces of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import Contraction, Point, split
from ..emit import (
    LANES,
    ceildiv,
    int64,
    parallel,
    registers,
    serial,
    store_columns,
    vectorized,
)


@dataclass(frozen=True)
class Streams:
    """How many accumulators of 16 lanes run side by side, bounded by the vector registers."""

    along_k: int
    along_n: int


def gemv(product: Contraction, streams: Streams) -> None:
    """Emit the product for its first row."""
    if product.right_runs_along_columns:
        _gemv_along_n(product, streams.along_n)
    else:
        _gemv_along_k(product, streams.along_k)


def _gemv_along_k(product: Contraction, streams: int) -> None:
    columns, k = product.column.dom.extent, product.reduction.dom.extent
    tasks = ceildiv(columns, streams)
    with parallel(product.batch.extent * tasks) as task:
        outer, inner = split(task, tasks)
        point, first = _first_row(product, product.batch.at(outer)), T.Bind(inner * streams)
        at = [T.Bind(tirx.min(first + s, columns - 1)) for s in range(streams)]
        sums, result = registers(streams), registers(1, streams)[0]
        with serial(k // LANES) as block, vectorized() as lane:
            _add_products(product, point, at, block * LANES + lane, lane, sums)
        with serial(k % LANES) as rest:
            _add_products(product, point, at, k - k % LANES + rest, int64(0), sums)
        for s, acc in enumerate(sums):
            _fold_lanes(acc)
            T.buffer_store(result, acc[0], [int64(s)])
        store_columns(product, point, first, result, lanes=streams)


def _add_products(
    product: Contraction,
    point: Point,
    at: Sequence[tirx.Expr],
    depth: tirx.Expr,
    lane: tirx.Expr,
    sums: Sequence[tirx.Buffer],
) -> None:
    """Add lhs[k] * rhs[n, k] at k = `depth` to a lane of the sum of each column in `at`."""
    x = T.Bind(product.left({**point, product.reduction.var: depth}))
    for column, acc in zip(at, sums, strict=True):
        here = {**point, product.column.var: column, product.reduction.var: depth}
        T.buffer_store(acc, acc[lane] + x * product.right(here), [lane])


def _fold_lanes(acc: tirx.Buffer) -> None:
    """Sum of the lanes into lane 0, by halves."""
    half = LANES // 2
    while half:
        with vectorized(half) as lane:
            T.buffer_store(acc, acc[lane] + acc[lane + half], [lane])
        half //= 2


def _gemv_along_n(product: Contraction, streams: int) -> None:
    columns, width = product.column.dom.extent, streams * LANES
    tasks = ceildiv(columns, width)
    with parallel(product.batch.extent * tasks) as task:
        outer, inner = split(task, tasks)
        point, first = _first_row(product, product.batch.at(outer)), T.Bind(inner * width)
        with T.If(first + width <= columns):
            with T.Then():
                _columns_along_n(product, point, first, streams)
            with T.Else(), serial(ceildiv(columns - first, LANES)) as v:
                _columns_clamped(product, point, first + v * LANES)


def _columns_along_n(product: Contraction, point: Point, first: tirx.Expr, streams: int) -> None:
    k, sums = product.reduction, registers(streams)
    with serial(k.dom.extent) as depth:
        x = T.Bind(product.left({**point, k.var: depth}))
        for s, acc in enumerate(sums):
            with vectorized() as lane:
                column = first + s * LANES + lane
                here = {**point, product.column.var: column, k.var: depth}
                T.buffer_store(acc, acc[lane] + x * product.right(here), [lane])
    for s, acc in enumerate(sums):
        store_columns(product, point, first + s * LANES, acc)


def _columns_clamped(product: Contraction, point: Point, first: tirx.Expr) -> None:
    columns, k, acc = product.column.dom.extent, product.reduction, registers(1)[0]
    with serial(k.dom.extent) as depth:
        x = T.Bind(product.left({**point, k.var: depth}))
        with serial(LANES) as lane:
            column = tirx.min(first + lane, columns - 1)
            here = {**point, product.column.var: column, k.var: depth}
            T.buffer_store(acc, acc[lane] + x * product.right(here), [lane])
    store_columns(product, point, first, acc)


def _first_row(product: Contraction, point: Point) -> Point:
    return {**product.rows.at(int64(0)), **point}
