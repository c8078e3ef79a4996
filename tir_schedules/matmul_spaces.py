"""Parameters of the llvm kernels for matrix products: defaults by the target, and the choices."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.target import Target

from .contraction import LANES, Contraction, Int4Weight
from .cpu_target import vector_lanes
from .gemm import Tile
from .gemv import Streams
from .tuning_space import Space, Spaces
from .w4a8 import Int8Tile

_PANEL_BYTES = 1 << 20
"""Half of a usual L2 cache."""

_WIDEST_PANEL, _SYMBOLIC_PANEL = 8, 4
"""Vectors of 16 columns in a panel at most, and where k is symbolic."""

_PANELS = (2, 4, 6, 8, 12, 16)

# By float32 lanes of the target's vector registers.
_STREAMS = {16: Streams(4, 8, 16), 8: Streams(2, 4, 4), 4: Streams(1, 2, 2)}
_STREAM_CHOICES = {16: (1, 2, 3, 4, 6, 8), 8: (1, 2, 3, 4), 4: (1, 2)}
_TILES = {16: Tile(12, 2, 0), 8: Tile(6, 1, 0), 4: Tile(3, 1, 0)}
_TILE_CHOICES = {
    16: {"rows": (4, 6, 8, 9, 12, 14), "vectors": (1, 2, 3, 4)},
    8: {"rows": (2, 3, 4, 5, 6), "vectors": (1, 2)},
    4: {"rows": (1, 2, 3, 4), "vectors": (1,)},
}
_INT8_TILES = {16: Int8Tile(3, 4), 8: Int8Tile(2, 1), 4: Int8Tile(1, 1)}
_INT8_ROWS = {16: (1, 2, 3, 4, 6), 8: (1, 2, 3, 4), 4: (1, 2)}
_INT8_VECTORS = {16: (1, 2, 3, 4), 8: (1, 2), 4: (1, 2)}
_INT8_STREAMS, _WORDS = (1, 2, 3, 4, 6, 8), (1, 2, 4)


def float_spaces(product: Contraction, target: Target) -> Spaces:
    """Of products of floats, and of floats and an INT4 weight: `Streams` and `Tile`."""
    lanes = vector_lanes(target)
    one, more = _STREAMS[lanes], _tile(product, lanes)
    if not isinstance(product.rhs, Int4Weight):
        return {"1": Space(1, 1, one, {}), "2+": Space(None, 512, more, {})}
    return {
        "1": Space(1, 1, one, {"int4": _STREAM_CHOICES[lanes]}),
        "2+": Space(None, 512, more, {**_TILE_CHOICES[lanes], "panel": _PANELS}),
    }


def int8_spaces(target: Target) -> Spaces:
    """Of products of INT8 activations and an INT4 weight: an `Int8Tile` each.

    Integer and float sums of the default fit the vector registers together.
    """
    lanes = vector_lanes(target)
    tile, words = _INT8_TILES[lanes], {"words": _WORDS}
    tiles = {"rows": _INT8_ROWS[lanes], "vectors": _INT8_VECTORS[lanes], **words}
    return {
        "1": Space(1, 1, Int8Tile(1, max(tile.vectors, 2)), {"vectors": _INT8_STREAMS, **words}),
        "2-32": Space(32, 8, replace(tile, words=2), tiles),
        "33+": Space(None, 512, replace(tile, panel=4), {**tiles, "panel": _PANELS}),
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
