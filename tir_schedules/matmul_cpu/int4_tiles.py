"""The llvm schedule of products with an INT4 weight, for any number of rows.

A register tile holds `rows` x `vectors` sums of one group, 16 channels to a vector, and as many
float32 sums of groups that are scaled already::

    for group:
        sums = 0
        for word in group:                    # 8 codes of each of 16 channels
            for part in decode(word):
                sums += part * activations
        totals += float(sums) * scale

What a word decodes to, and how it is added, is the `Arithmetic`. Few rows decode in registers, and
memory sets the pace: a task reads its vectors from places far apart, as streams of their own. Many
rows decode a panel of the weight once, which stays in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from ..contraction import Contraction, Int4Weight
from ..emit import (
    LANES,
    Index,
    ceildiv,
    first_that_holds,
    has_whole_vectors,
    int64,
    parallel,
    registers,
    serial,
    store_columns,
    vectorized,
    when,
)
from ..int4_format.packing import CODES_PER_WORD
from .int4_arithmetic import Arithmetic, MakeArithmetic, Row

DecodedGroup: TypeAlias = Callable[[int, tirx.Expr, int], Iterable[tirx.Expr]]
"""The parts of (vector of the tile, word, first lane)."""

Codes: TypeAlias = Callable[[tirx.Expr], DecodedGroup]
"""What decodes a group."""

_IN_MEMORY = {"tirx.volatile": True}
"""Where a vector may be stored in part, LLVM otherwise keeps the sums for both branches, and spills
them in the loop over k."""


@dataclass(frozen=True)
class RegisterTile:
    """A register tile of `rows` x (16 * `vectors`); `words` of a group are unrolled.

    A `panel` of so many vectors is decoded at once; 0 decodes in registers.
    """

    rows: int
    vectors: int
    words: int = 4
    panel: int = 0


@dataclass(frozen=True)
class _Product:
    """A product with the parts it needs."""

    product: Contraction
    weight: Int4Weight
    arithmetic: Arithmetic
    tile: RegisterTile

    @property
    def tiles(self) -> tirx.Expr:
        return self.weight.codes.shape[0]

    @property
    def words_per_group(self) -> int:
        return self.weight.group_size // CODES_PER_WORD

    @property
    def groups(self) -> tirx.Expr:
        return self.weight.scale.shape[1]


def int4_product(
    product: Contraction, arithmetic: MakeArithmetic, tile: RegisterTile, one: bool, cores: int
) -> None:
    """Emit the product: for `one` row, or for any number of them.

    Without a panel each task reads as many streams as the tile has vectors.
    """
    assert isinstance(product.rhs, Int4Weight)
    loop = serial if one else parallel
    parts = _Product(product, product.rhs, arithmetic(product, loop), tile)
    if tile.panel:
        _many_rows(parts)
    else:
        _few_rows(parts, _even_tasks(int(parts.tiles), tile.vectors, cores))


def _even_tasks(tiles: int, streams: int, cores: int) -> int:
    """A few tasks for each core, such that all have about the same number of tiles."""

    def places(tasks: int) -> int:
        return -(-tiles // (tasks * streams)) * tasks * streams

    return min((4 * cores, 2 * cores, cores), key=places)


class _Columns:
    """Tiles that are computed together; one from `stop` on repeats the last and is not stored."""

    def __init__(self, tile: Callable[[Index], tirx.Expr], count: int, stop: tirx.Expr) -> None:
        self.tile, self.stop = tile, stop
        self.at = [T.Bind(tirx.min(tile(v), stop - 1)) for v in range(count)]


def _few_rows(parts: _Product, tasks: int) -> None:
    """Each task walks `vectors` runs of neighbouring tiles at once."""
    streams = parts.tile.vectors
    length = ceildiv(parts.tiles, tasks * streams)
    with parallel(tasks) as task, serial(length) as step:
        columns = _Columns(lambda v: (task * streams + v) * length + step, streams, parts.tiles)
        codes = _packed(parts, columns.at)
        _all_rows(parts, lambda row, height: _tile(parts, row, height, columns, codes))


def _many_rows(parts: _Product) -> None:
    tile = parts.tile
    with parallel(ceildiv(parts.tiles, tile.panel)) as task:
        first = T.Bind(task * tile.panel)
        width = T.Bind(tirx.min(int64(tile.panel), parts.tiles - first))
        panel = _decode_panel(parts, first, width)

        def row_of_tiles(row: tirx.Expr, height: int) -> None:
            with serial(ceildiv(width, tile.vectors)) as j:
                start = first + j * tile.vectors
                columns = _Columns(lambda v: start + v, tile.vectors, first + width)
                codes = _unpacked(parts, panel, [at - first for at in columns.at])
                _tile(parts, row, height, columns, codes)

        _all_rows(parts, row_of_tiles)


def _all_rows(parts: _Product, emit: Callable[[tirx.Expr, int], None]) -> None:
    """``emit(first row, how many)`` for tiles of the full height, then for the rows left."""
    rows, height = parts.product.rows.extent, parts.tile.rows
    with serial(rows // height) as i:
        emit(i * height, height)
    rest = rows % height
    branches = [
        (rest == fewer, lambda fewer=fewer: emit(rows - fewer, fewer)) for fewer in range(1, height)
    ]
    first_that_holds(branches, lambda: None)


def _tile(parts: _Product, row: tirx.Expr, height: int, columns: _Columns, codes: Codes) -> None:
    """Compute and store `height` rows."""
    product, width = parts.product, len(columns.at)
    which = [parts.arithmetic.row(row + i) for i in range(height)]
    annotations = None if has_whole_vectors(product) else _IN_MEMORY
    shape = int64(height), int64(width * LANES)
    result = T.alloc_buffer(shape, "float32", annotations=annotations)
    for i, sums in enumerate(_multiply(parts, which, columns.at, codes)):
        for v, total in enumerate(sums):
            with vectorized() as lane:
                T.buffer_store(result, total[lane], [int64(i), v * LANES + lane])
    with serial(height) as r, serial(width) as v:
        column = columns.tile(v)
        with when(column < columns.stop):
            store_columns(product, product.rows.at(row + r), column * LANES, result, [r, v * LANES])


def _multiply(
    parts: _Product,
    rows: Sequence[Row],
    at: Sequence[tirx.Expr],
    codes: Codes,
) -> list[list[tirx.Buffer]]:
    """float32 sums [row][vector] of the channels of the tiles `at`."""
    totals = [registers(len(at)) for _ in rows]
    together = parts.arithmetic.groups_per_scale
    with serial(parts.groups // together) as outer:
        x_scales = [parts.arithmetic.scale(row, outer) for row in rows]
        apart = together > 1 and parts.tile.panel > 0  # few rows wait for memory, not for this
        sums = [registers(len(at)) for _ in rows] if apart else totals
        with serial(together) as inner:
            group = T.Bind(outer * together + inner)
            _add_group(
                parts, rows, at, group, codes, sums, [None] * len(rows) if apart else x_scales
            )
        if apart:
            for row_sums, x_scale, row_totals in zip(sums, x_scales, totals, strict=True):
                for part, total in zip(row_sums, row_totals, strict=True):
                    with vectorized() as lane:
                        T.buffer_store(total, total[lane] + part[lane] * x_scale, [lane])
    return totals


def _add_group(
    parts: _Product,
    rows: Sequence[Row],
    at: Sequence[tirx.Expr],
    group: tirx.Expr,
    codes: Codes,
    totals: Sequence[Sequence[tirx.Buffer]],
    x_scales: Sequence[tirx.Expr | None],
) -> None:
    """Add the sums of a group, scaled."""
    sums = parts.arithmetic.start(rows, at, group)
    decoded = codes(group)
    unrolled = _divisor(parts.words_per_group, parts.tile.words)
    with serial(parts.words_per_group // unrolled) as block:
        for w in range(unrolled):
            word = group * parts.words_per_group + block * unrolled + w
            _add_word(parts.arithmetic, rows, sums, T.Bind(word), decoded)
    for v, t in enumerate(at):
        scale = registers(1)[0]
        with vectorized() as lane:
            T.buffer_store(scale, parts.weight.scale[t, group, lane].astype("float32"), [lane])
        for row_sums, x_scale, row_totals in zip(sums, x_scales, totals, strict=True):
            with vectorized() as lane:
                factor = scale[lane] if x_scale is None else scale[lane] * x_scale
                step = row_sums[v][lane].astype("float32") * factor
                T.buffer_store(row_totals[v], row_totals[v][lane] + step, [lane])


def _add_word(
    arithmetic: Arithmetic,
    rows: Sequence[Row],
    sums: Sequence[Sequence[tirx.Buffer]],
    word: tirx.Expr,
    decoded: DecodedGroup,
) -> None:
    """Add the products of 8 columns of k."""
    lanes = arithmetic.lanes
    for v in range(len(sums[0])):
        for first in range(0, LANES, lanes):
            at = _lanes(first, lanes)
            for index, part in enumerate(decoded(v, word, first)):
                for row, row_sums in zip(rows, sums, strict=True):
                    x = tirx.Broadcast(arithmetic.activation(row, word, index), lanes)
                    T.buffer_store(row_sums[v], arithmetic.add(row_sums[v][at], part, x), [at])


def _packed(parts: _Product, at: Sequence[tirx.Expr]) -> Codes:
    """Codes from the packed weight."""

    def of_group(group: tirx.Expr) -> DecodedGroup:
        decoders = [parts.arithmetic.decoder(tile, group) for tile in at]

        def codes(v: int, word: tirx.Expr, first: int) -> Iterable[tirx.Expr]:
            lanes = _lanes(first, parts.arithmetic.lanes)
            return decoders[v](T.Bind(parts.weight.codes[at[v], word, lanes]))

        return codes

    return of_group


def _unpacked(parts: _Product, panel: tirx.Buffer, at: Sequence[tirx.Expr]) -> Codes:
    """Codes from a panel (vector, word and part, lane)."""
    count = parts.arithmetic.parts

    def codes(v: int, word: tirx.Expr, first: int) -> list[tirx.Expr]:
        lanes = _lanes(first, parts.arithmetic.lanes)
        return [panel[at[v], word * count + part, lanes] for part in range(count)]

    return lambda _: codes


def _decode_panel(parts: _Product, first: tirx.Expr, width: tirx.Expr) -> tirx.Buffer:
    arithmetic, per_group = parts.arithmetic, parts.words_per_group
    words, count = parts.weight.codes.shape[1], arithmetic.parts
    buffer = T.alloc_buffer(
        (int64(parts.tile.panel), words * count, int64(LANES)), arithmetic.dtype
    )
    with serial(width) as v, serial(parts.groups) as group:
        decoded = _packed(parts, [T.Bind(first + v)])(group)
        with serial(per_group) as w:
            word = T.Bind(group * per_group + w)
            for start in range(0, LANES, arithmetic.lanes):
                lanes = _lanes(start, arithmetic.lanes)
                for part, codes in enumerate(decoded(0, word, start)):
                    T.buffer_store(buffer, codes, [v, word * count + part, lanes])
    return buffer


def _lanes(first: int, count: int) -> tirx.Expr:
    return tirx.Ramp(int64(first), int64(1), count)


def _divisor(extent: int, most: int) -> int:
    return max(d for d in range(1, min(extent, most) + 1) if extent % d == 0)
