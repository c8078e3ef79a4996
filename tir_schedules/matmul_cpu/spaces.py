"""Parameters of the llvm kernels for matrix products: defaults by the target, and the choices."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.target import Target

from ..contraction import LANES, Contraction
from ..cpu_target import vector_lanes
from ..records.space import Space, Spaces
from .gemm import Tile
from .gemv import Streams
from .int4_tiles import RegisterTile

_PANEL_BYTES = 1 << 20
"""Half of a usual L2 cache."""

_WIDEST_PANEL, _SYMBOLIC_PANEL = 8, 4
"""Vectors of 16 columns in a panel at most, and where k is symbolic."""

_PANELS = (2, 4, 6, 8, 12, 16)

# By float32 lanes of the target's vector registers.
_STREAMS = {16: Streams(8, 16), 8: Streams(4, 4), 4: Streams(2, 2)}
_INT4_STREAMS = {16: 3, 8: 2, 4: 1}
_TILES = {16: Tile(12, 2, 0), 8: Tile(6, 1, 0), 4: Tile(3, 1, 0)}
_FEW_FLOATS = {16: RegisterTile(4, 2, 1), 8: RegisterTile(2, 1, 1), 4: RegisterTile(1, 1, 1)}
_TILE_CHOICES = {
    16: {"rows": (4, 6, 8, 9, 12, 14), "vectors": (1, 2, 3, 4)},
    8: {"rows": (2, 3, 4, 5, 6), "vectors": (1, 2)},
    4: {"rows": (1, 2, 3, 4), "vectors": (1,)},
}
_INT8_STREAMS = {16: 4, 8: 2, 4: 2}
_FEW_INT8 = {16: RegisterTile(4, 3, 2), 8: RegisterTile(2, 1, 2), 4: RegisterTile(1, 1, 2)}
_MANY_INT8 = {16: RegisterTile(4, 2), 8: RegisterTile(2, 1), 4: RegisterTile(1, 1)}
_INT8_ROWS = {16: (1, 2, 3, 4, 6), 8: (1, 2, 3, 4), 4: (1, 2)}
_INT8_VECTORS = {16: (1, 2, 3, 4), 8: (1, 2), 4: (1, 2)}
_STREAM_CHOICES, _WORDS = (1, 2, 3, 4, 6, 8), (1, 2, 4)


def float_spaces(product: Contraction, target: Target) -> Spaces:
    """Of products of floats: `Streams` and `Tile`."""
    lanes = vector_lanes(target)
    more = _tile(product, lanes)
    return {"1": Space(1, 1, _STREAMS[lanes], {}), "2+": Space(None, 512, more, {})}


def float32_spaces(product: Contraction, target: Target) -> Spaces:
    """Of products of floats and an INT4 weight: a `RegisterTile`, and a `Tile`."""
    lanes = vector_lanes(target)
    one, few = RegisterTile(1, _INT4_STREAMS[lanes], 1), _FEW_FLOATS[lanes]
    more = {**_TILE_CHOICES[lanes], "panel": _PANELS}
    return {
        "1": Space(1, 1, one, {"vectors": _STREAM_CHOICES}),
        "2-8": Space(8, 4, few, {"rows": (1, 2, 3, 4), "vectors": (1, 2, 3, 4)}),
        "9+": Space(None, 512, _tile(product, lanes), more),
    }


def bfloat16_spaces(product: Contraction, target: Target) -> Spaces:
    """Of products of bfloat16 and an INT4 weight where a CPU has them: a `RegisterTile` each."""
    one, few, many = RegisterTile(1, 4, 2), RegisterTile(3, 4, 1), RegisterTile(6, 2, 1)
    tiles = {"rows": (1, 2, 3, 4, 6), "vectors": (1, 2, 3, 4), "words": _WORDS}
    fits = _PANEL_BYTES // (2 * LANES * max(1, product.padded_k.value))
    panel = replace(many, panel=max(many.vectors, min(fits, 4)))
    return {
        "1": Space(1, 1, one, {"vectors": _STREAM_CHOICES, "words": _WORDS}),
        "2-16": Space(16, 8, few, tiles),
        "17+": Space(None, 512, panel, {**tiles, "panel": _PANELS}),
    }


def int8_spaces(_product: Contraction, target: Target) -> Spaces:
    """Of products of INT8 activations and an INT4 weight: a `RegisterTile` each.

    Integer sums, and float sums of a group and of all, of the default fit the vector registers.
    """
    lanes = vector_lanes(target)
    one, many = RegisterTile(1, _INT8_STREAMS[lanes]), replace(_MANY_INT8[lanes], panel=4)
    words = {"words": _WORDS}
    tiles = {"rows": _INT8_ROWS[lanes], "vectors": _INT8_VECTORS[lanes], **words}
    return {
        "1": Space(1, 1, one, {"vectors": _STREAM_CHOICES, **words}),
        "2-32": Space(32, 8, _FEW_INT8[lanes], tiles),
        "33+": Space(None, 512, many, {**tiles, "panel": _PANELS}),
    }


def _tile(product: Contraction, lanes: int) -> Tile:
    """The tile for the registers, with a panel for the cache."""
    tile, depth, fits = _TILES[lanes], product.padded_k, _SYMBOLIC_PANEL
    if isinstance(depth, tirx.IntImm):
        fits = min(_WIDEST_PANEL, _PANEL_BYTES // (4 * LANES * max(1, depth.value)))
    return replace(tile, panel=max(tile.vectors, fits))


def balanced(product: Contraction, tile: Tile, cores: int) -> Tile:
    """A panel, no wider, of whole tiles, that leaves the busiest core the fewest columns.

    The widest of equals.
    """
    columns = product.column.dom.extent
    widths = range(tile.vectors, max(tile.vectors, tile.panel) + 1, tile.vectors)
    if not isinstance(columns, tirx.IntImm):
        return replace(tile, panel=widths[-1])
    vectors = -(-columns.value // LANES)

    def columns_of_busiest(width: int) -> int:
        panels = -(-vectors // width)
        return -(-panels // cores) * width

    return replace(tile, panel=min(reversed(widths), key=columns_of_busiest))
