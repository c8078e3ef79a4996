"""The work of a CUDA INT4 product, from its tile."""

from __future__ import annotations

import math

from tvm import tirx

from ..records.work import Work
from .operands import Operands
from .tile import CHANNELS, LANES, TOKENS, UNIT, UNIT_BYTES, Tile

_HALF, _INT8 = ("HMMA.16816.F32", 16), ("IMMA.16832.S8.S8", 32)
_INT4, _HALF_UNIT_INT4 = ("IMMA.16864.S4.S4", 64), ("IMMA.16864.S4.S4", 32)
_HALF_WARPGROUP, _INT8_WARPGROUP = ("HGMMA.64x{}x16.F32", 16), ("IGMMA.64x{}x32.S8.S8", 32)
"""The products, and their columns; a warpgroup multiplies with all tokens of a block at once."""

_REGISTERS, _MOST_REGISTERS, _ALL_REGISTERS = 24, 255, 1 << 16
"""That a thread needs beside its sums at least; that one may have; and those of an SM."""


def work(operands: Operands, tile: Tile, output_width: int) -> Work:
    """Of a static number of rows, `operands.most`; elements of the output have so many bytes."""
    rows, steps, stage = operands.most or 0, operands.steps_of_part(tile), operands.stage(tile)
    products = steps * tile.tokens * tile.channels * tile.units * operands.terms
    products *= 1 + operands.halves_units
    across = -(-operands.channel_tiles // tile.channel_tiles)
    weight = (operands.weight.codes, operands.weight.scale, operands.weight.zero_point)
    output_bytes = rows * operands.n * output_width
    read = sum(map(_bytes, (*weight, operands.x, operands.x_scale, operands.x_sums)))
    return Work(
        multiply_adds=products * CHANNELS * UNIT * TOKENS,
        opcodes=_opcodes(operands, tile, steps),
        blocks=across * -(-rows // tile.block_tokens) * tile.split,
        threads=tile.threads,
        registers=_REGISTERS + _sums(operands, tile),
        shared=stage.shared_bytes,
        hbm_bytes=read + (output_bytes if tile.split == 1 else 0),
        weight_bytes=operands.n * operands.k // 2,
        copied=steps * stage.copied,
        in_flight=min(tile.stages - 1, steps) * tile.channel_tiles * tile.step_units * UNIT_BYTES,
        output_bytes=output_bytes if tile.split > 1 else 0,
        partial_bytes=tile.split * rows * operands.n * 4 if tile.split > 1 else 0,
    )


def unknown_work(operands: Operands, tile: Tile) -> str | None:
    """Why `work` is not that of the machine code, or a tile not worth compiling; None if it is.

    The compiler drops products of tokens that there are not.
    """
    if tile.block_tokens - TOKENS >= (operands.most or 0):
        return f"a block has {tile.block_tokens} tokens, more than there are"
    sums = _sums(operands, tile)
    registers = min(_MOST_REGISTERS, _ALL_REGISTERS // tile.threads // 8 * 8)
    if sums + _REGISTERS > registers:
        return f"{sums} sums of a thread leave too few of its {registers} registers"
    return None


def _sums(operands: Operands, tile: Tile) -> int:
    """Registers of a thread that hold sums: with wgmma those of a group are all there at once,
    beside the scaled ones."""
    sums = 4 * tile.channels * tile.tokens
    return 2 * sums if tile.wgmma and operands.is_grouped else sums


def _opcodes(operands: Operands, tile: Tile, steps: int) -> dict[str, int]:
    """The products, what loads the weight from shared memory, and what decodes it."""
    units = steps * tile.units
    return {
        **(_by_warpgroups if tile.wgmma else _by_warps)(operands, tile, units),
        "LDS.128": units * tile.channels + steps * _loads_of_tokens(operands, tile),
        **_decoding(operands, tile, units),
    }


def _decoding(operands: Operands, tile: Tile, units: int) -> dict[str, int]:
    """A LOP3 and an operation on float16 pairs for two codes, or two LOP3 for eight codes that
    become INT8; those of INT4 activations, too. Symmetric ones for products of INT4 take one."""
    words = units * tile.channels * CHANNELS * UNIT // LANES // 8  # of eight codes
    if not operands.is_quantized:
        return {"LOP3.LUT": 4 * words, "HADD2": 4 * words}
    if operands.has_int4_products:
        return {"LOP3.LUT": words if operands.weight.zero_point is None else 0}
    return {"LOP3.LUT": 2 * words + (4 * units * tile.tokens if operands.is_packed else 0)}


def _product(operands: Operands) -> tuple[str, int]:
    if operands.has_int4_products:
        return _HALF_UNIT_INT4 if operands.halves_units else _INT4
    return _INT8 if operands.is_quantized else _HALF


def _loads_of_tokens(operands: Operands, tile: Tile) -> int:
    """Of scales and sums of activations in a stage, two tiles of tokens at once."""
    stage = operands.stage(tile)
    if not operands.is_quantized or not stage.pairs_tiles:
        return 0
    return stage.groups * tile.tokens // 2 * (1 + stage.has_zeros)


def _by_warpgroups(operands: Operands, tile: Tile, units: int) -> dict[str, int]:
    """Products, which read the activations themselves."""
    product, columns = _INT8_WARPGROUP if operands.is_quantized else _HALF_WARPGROUP
    return {product.format(TOKENS * tile.tokens): units * tile.channels * UNIT // columns}


def _by_warps(operands: Operands, tile: Tile, units: int) -> dict[str, int]:
    """Products, and what loads the activations from shared memory."""
    product, columns = _product(operands)
    tokens = tile.tokens * operands.terms
    return {
        product: units * tile.channels * tokens * UNIT // columns,
        "LDSM.16.M88.4": units * tokens * operands.unit_bytes // 64,
    }


def _bytes(buffer: tirx.Buffer | None) -> int:
    if buffer is None:
        return 0
    return math.prod(int(extent) for extent in buffer.shape) * int(buffer.dtype.itemsize)
