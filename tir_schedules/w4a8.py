"""The llvm schedule of INT8 activations times INT4 weights, for any number of rows.

A register tile holds `rows` x `vectors` int32 sums of one group, 16 channels to a vector, and as
many float32 sums of groups that are scaled already::

    for group:
        ints = -zero point * sum of the activations
        for word in group:                    # 8 codes of each of 16 channels
            even, odd = codes & 0x0f…, codes >> 4 & 0x0f…
            ints += even . activations[2 word] + odd . activations[2 word + 1]
        floats += float(ints) * (scale * scale of the activations)

Few rows decode in registers, and memory sets the pace: a task reads its vectors from places far
apart, as streams of their own. Many rows decode a panel of the weight once, which stays in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from .contraction import Contraction, Int4Weight, Int8Rows
from .emit import (
    LANES,
    ceildiv,
    first_that_holds,
    int64,
    parallel,
    registers,
    serial,
    store_columns,
    vectorized,
    when,
)
from .int4_decode import zero_points
from .int8_dot import Int8Dot
from .packing import CODES_PER_WORD

_NIBBLES = 0x0F0F0F0F

Codes: TypeAlias = Callable[[int, tirx.Expr, int], tuple[tirx.Expr, tirx.Expr]]
"""Even and odd codes of (vector of the tile, word, first lane), four bytes to an int32."""


Row: TypeAlias = Sequence[tirx.Expr]
"""Indices of a row of the activations."""


@dataclass(frozen=True)
class Int8Tile:
    """A register tile of `rows` x (16 * `vectors`); `words` of a group are unrolled.

    A `panel` of so many vectors is decoded at once; 0 decodes in registers.
    """

    rows: int
    vectors: int
    words: int = 4
    panel: int = 0


@dataclass(frozen=True)
class _Product:
    """A product with the parts it needs, and how to add four products of bytes."""

    product: Contraction
    x: Int8Rows
    weight: Int4Weight
    dot: Int8Dot

    @property
    def tiles(self) -> tirx.Expr:
        return self.weight.codes.shape[0]

    @property
    def words_per_group(self) -> int:
        return self.weight.group_size // CODES_PER_WORD

    @property
    def groups(self) -> tirx.Expr:
        return self.weight.scale.shape[1]


def w4a8(product: Contraction, dot: Int8Dot, tile: Int8Tile, one: bool, cores: int) -> None:
    """Emit the product: for `one` row, or for any number of them.

    For one row each task reads as many streams as the tile has vectors.
    """
    assert isinstance(product.lhs, Int8Rows)
    assert isinstance(product.rhs, Int4Weight)
    parts = _Product(product, product.lhs, product.rhs, dot)
    if one:
        _one_row(parts, tile, _even_tasks(int(parts.tiles), tile.vectors, cores))
    elif tile.panel:
        _many_rows(parts, tile)
    else:
        _few_rows(parts, tile)


def _even_tasks(tiles: int, streams: int, cores: int) -> int:
    """A few tasks for each core, such that all have about the same number of tiles."""

    def places(tasks: int) -> int:
        return -(-tiles // (tasks * streams)) * tasks * streams

    return min((4 * cores, 2 * cores, cores), key=places)


def _one_row(parts: _Product, tile: Int8Tile, tasks: int) -> None:
    """Each task walks `vectors` runs of neighbouring tiles at once."""
    runs = tasks * tile.vectors
    length = ceildiv(parts.tiles, runs)
    with parallel(tasks) as task, serial(length) as step:
        columns = [T.Bind((task * tile.vectors + v) * length + step) for v in range(tile.vectors)]
        at = [T.Bind(tirx.min(column, parts.tiles - 1)) for column in columns]
        (sums,) = _multiply(parts, [_bound(parts.product, int64(0))], at, tile, _packed(parts, at))
        point = parts.product.rows.at(int64(0))
        for column, total in zip(columns, sums, strict=True):
            with when(column < parts.tiles):
                store_columns(parts.product, point, column * LANES, total)


def _bound(product: Contraction, row: tirx.Expr) -> Row:
    """The indices of a row, computed once."""
    return [T.Bind(index) for index in product.rows.indices(T.Bind(row))]


def _few_rows(parts: _Product, tile: Int8Tile) -> None:
    with parallel(ceildiv(parts.tiles, tile.vectors)) as task:
        first = T.Bind(task * tile.vectors)
        at = [T.Bind(tirx.min(first + v, parts.tiles - 1)) for v in range(tile.vectors)]
        _all_rows(
            parts,
            tile,
            lambda row, height: _tile(parts, row, height, first, at, tile, _packed(parts, at)),
        )


def _many_rows(parts: _Product, tile: Int8Tile) -> None:
    with parallel(ceildiv(parts.tiles, tile.panel)) as task:
        first = T.Bind(task * tile.panel)
        width = T.Bind(tirx.min(int64(tile.panel), parts.tiles - first))
        panel = _decode_panel(parts, first, width, tile.panel)

        def columns(row: tirx.Expr, height: int) -> None:
            with serial(ceildiv(width, tile.vectors)) as j:
                column = j * tile.vectors
                inside = [T.Bind(tirx.min(column + v, width - 1)) for v in range(tile.vectors)]
                at = [T.Bind(first + v) for v in inside]
                codes = _unpacked(parts, panel, inside)
                _tile(parts, row, height, first + column, at, tile, codes)

        _all_rows(parts, tile, columns)


def _all_rows(parts: _Product, tile: Int8Tile, emit: Callable[[tirx.Expr, int], None]) -> None:
    """``emit(first row, how many)`` for tiles of the full height, then for the rows left."""
    rows = parts.product.rows.extent
    with serial(rows // tile.rows) as i:
        emit(i * tile.rows, tile.rows)
    rest = rows % tile.rows
    branches = [
        (rest == height, lambda height=height: emit(rows - height, height))
        for height in range(1, tile.rows)
    ]
    first_that_holds(branches, lambda: None)


def _tile(
    parts: _Product,
    row: tirx.Expr,
    height: int,
    column: tirx.Expr,
    at: Sequence[tirx.Expr],
    tile: Int8Tile,
    codes: Codes,
) -> None:
    """Compute and store `height` rows; columns beyond the last repeat it and are not stored."""
    product = parts.product
    which = [_bound(product, row + i) for i in range(height)]
    result = T.alloc_buffer((int64(height), int64(tile.vectors * LANES)), "float32")
    for i, sums in enumerate(_multiply(parts, which, at, tile, codes)):
        for v, total in enumerate(sums):
            with vectorized() as lane:
                T.buffer_store(result, total[lane], [int64(i), v * LANES + lane])
    width = tirx.min(parts.tiles - column, int64(tile.vectors))
    with serial(height) as r, serial(width) as v:
        point = product.rows.at(row + r)
        store_columns(product, point, (column + v) * LANES, result, [r, v * LANES])


def _multiply(
    parts: _Product,
    rows: Sequence[Row],
    at: Sequence[tirx.Expr],
    tile: Int8Tile,
    codes: Codes,
) -> list[list[tirx.Buffer]]:
    """float32 sums [row][vector] of the channels of the tiles `at`."""
    floats = [registers(len(at)) for _ in rows]
    with serial(parts.groups) as group:
        ints = _biased_sums(parts, rows, at, group)
        unrolled = _divisor(parts.words_per_group, tile.words)
        with serial(parts.words_per_group // unrolled) as block:
            for w in range(unrolled):
                word = group * parts.words_per_group + block * unrolled + w
                _add_word(parts, rows, ints, T.Bind(word), codes)
        for v, t in enumerate(at):
            scale = registers(1)[0]
            with vectorized() as lane:
                T.buffer_store(scale, parts.weight.scale[t, group, lane].astype("float32"), [lane])
            for row, row_ints, row_floats in zip(rows, ints, floats, strict=True):
                x_scale = T.Bind(parts.x.scale[(*row, group)])
                with vectorized() as lane:
                    step = row_ints[v][lane].astype("float32") * (scale[lane] * x_scale)
                    T.buffer_store(row_floats[v], row_floats[v][lane] + step, [lane])
    return floats


def _biased_sums(
    parts: _Product, rows: Sequence[Row], at: Sequence[tirx.Expr], group: tirx.Expr
) -> list[list[tirx.Buffer]]:
    """Integer sums of a group at their start: -zero point * sum of the activations."""
    zeros = [zero_points(parts.weight, tile, group) for tile in at]
    ints = []
    for row in rows:
        x_sum = T.Bind(-parts.x.sums[(*row, group)])
        ints.append([T.alloc_buffer((int64(LANES),), "int32", scope="local") for _ in at])
        for buffer, zero in zip(ints[-1], zeros, strict=True):
            with vectorized() as lane:
                T.buffer_store(buffer, zero(lane) * x_sum, [lane])
    return ints


def _add_word(
    parts: _Product,
    rows: Sequence[Row],
    ints: Sequence[Sequence[tirx.Buffer]],
    word: tirx.Expr,
    codes: Codes,
) -> None:
    """Add the products of 8 columns of k."""
    x, lanes = parts.x.codes, parts.dot.lanes
    for v in range(len(ints[0])):
        for first in range(0, LANES, lanes):
            at = _lanes(first, lanes)
            for half, four in enumerate(codes(v, word, first)):
                for row, sums in zip(rows, ints, strict=True):
                    same = tirx.Broadcast(x[(*row, word * 2 + half)], lanes)
                    T.buffer_store(sums[v], parts.dot.add(sums[v][at], four, same), [at])


def _packed(parts: _Product, at: Sequence[tirx.Expr]) -> Codes:
    """Codes from the packed weight."""

    def codes(v: int, word: tirx.Expr, first: int) -> tuple[tirx.Expr, tirx.Expr]:
        lanes = parts.dot.lanes
        return _nibbles(T.Bind(parts.weight.codes[at[v], word, _lanes(first, lanes)]), lanes)

    return codes


def _unpacked(parts: _Product, panel: tirx.Buffer, at: Sequence[tirx.Expr]) -> Codes:
    """Codes from a panel (vector, 2 word + half, lane)."""

    def codes(v: int, word: tirx.Expr, first: int) -> tuple[tirx.Expr, tirx.Expr]:
        lanes = _lanes(first, parts.dot.lanes)
        return panel[at[v], word * 2, lanes], panel[at[v], word * 2 + 1, lanes]

    return codes


def _nibbles(words: tirx.Expr, lanes: int) -> tuple[tirx.Expr, tirx.Expr]:
    """The even and the odd codes of words."""
    even, odd = (T.Bind(_four_codes(words, half, lanes)) for half in (0, 1))
    return even, odd


def _four_codes(words: tirx.Expr, half: int, lanes: int = 1) -> tirx.Expr:
    def const(value: int) -> tirx.Expr:
        scalar = tirx.const(value, "uint32")
        return scalar if lanes == 1 else tirx.Broadcast(scalar, lanes)

    four = (words >> const(4) if half else words) & const(_NIBBLES)
    return tirx.reinterpret("int32" if lanes == 1 else f"int32x{lanes}", four)


def _decode_panel(parts: _Product, first: tirx.Expr, width: tirx.Expr, panel: int) -> tirx.Buffer:
    words = parts.weight.codes.shape[1]
    buffer = T.alloc_buffer((int64(panel), words * 2, int64(LANES)), "int32")
    with serial(width) as v, serial(words) as word, vectorized() as lane:
        packed = T.Bind(parts.weight.codes[first + v, word, lane])
        for half in (0, 1):
            T.buffer_store(buffer, _four_codes(packed, half), [v, word * 2 + half, lane])
    return buffer


def _lanes(first: int, count: int) -> tirx.Expr:
    return tirx.Ramp(int64(first), int64(1), count)


def _divisor(extent: int, most: int) -> int:
    return max(d for d in range(1, min(extent, most) + 1) if extent % d == 0)
