"""Tiles of the CUDA kernels for products with INT4 weights: defaults by shape, and the choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from tvm.target import Target

from ..cuda_target import (
    architecture,
    has_warpgroup_products,
    multiprocessors,
    shared_memory,
)
from ..cuda_wgmma import ROW_BYTES, WARPGROUP, column_tiles
from ..records.space import Space, Spaces
from .operands import Operands
from .tile import UNIT, UNIT_BYTES, Stage, Tile

_FEW = {
    "2-8": (8, Tile(2, 1, 4, 1, 1, 4, 4)),
    "9-16": (16, Tile(2, 2, 4, 1, 1, 4, 4)),
    "17-32": (32, Tile(2, 4, 4, 1, 1, 2, 4)),
}
"""By the largest number of rows; these are cut along k, too, and so are those of `_SOME` rows."""

_SOME = {"33-64": 64, "65-256": 256}
"""256 rows of 1024 channels are 16 tiles of 128, an eighth of what a GPU runs at a time."""

_MANY = {80: Tile(1, 8, 4, 2, 1, 2, 4), 90: Tile(2, 8, 4, 1, 1, 2, 4)}
"""By the oldest architecture: on sm_80 the sums of the second one leave registers, but those of
INT8 groups."""

_INT8_GROUPS = {"33-64": Tile(2, 8, 4, 1, 1, 4, 3)}
"""Of INT8 activations and groups without zero points: with them sums leave registers."""

_INT4_GROUPS = Tile(2, 8, 2, 2, 1, 2, 4)
"""Of INT4 activations and groups from sm_90 on: four warps along channels leave registers."""

_FEW_TERMS = {
    "2-8": Tile(2, 1, 4, 1, 1, 2, 4),
    "9-16": Tile(2, 2, 4, 1, 1, 2, 4),
    "17-32": Tile(2, 4, 4, 1, 1, 2, 4),
}
_MANY_TERMS = Tile(2, 4, 4, 2, 1, 2, 3)
"""Where a token has three rows in shared memory: fewer tokens for a warp, and fewer stages."""

_WARPGROUPS = {
    "17-32": Tile(2, 4, 4, 1, 1, 2, 4, wgmma=1),
    "33-64": Tile(2, 8, 4, 1, 1, 4, 3, wgmma=1),
    "65-256": Tile(1, 16, 8, 1, 1, 2, 4, wgmma=1),
    "257+": Tile(1, 16, 8, 1, 1, 2, 4, wgmma=1),
}
"""Instead of those, where there are products of warpgroups and enough channels for them."""

_SMALL_GROUP_WARPGROUPS = {"33-64": Tile(2, 8, 4, 1, 1, 2, 4, wgmma=1)}
"""Of float activations and groups of less than 128 columns, whose sums leave registers else."""

_INT8_WARPGROUPS = {
    "17-32": Tile(2, 4, 4, 1, 1, 4, 3, wgmma=1),
    "257+": Tile(1, 16, 8, 1, 1, 4, 3, wgmma=1),
}
"""Rows of activations have half the bytes: stages are as long as those of float ones."""

_FEW_LONG = {"9-16": Tile(2, 2, 4, 1, 1, 8, 3)}
"""In long stages."""

_FLOAT_ZEROS = {"9-16": Tile(2, 2, 4, 1, 1, 4, 5)}
"""Of float activations and zero points of groups: fewer instructions than in four stages."""

_LONG_80 = {"17-32": Tile(2, 4, 4, 1, 1, 4, 4), "33-64": Tile(1, 8, 4, 1, 1, 4, 4)}
"""Of quantized activations on sm_80: in shorter stages sums of groups spill."""

_CHOICES = {
    "channels": (1, 2, 4),
    "tokens": (1, 2, 4, 8, 12, 16),
    "warps_n": (1, 2, 4),
    "warps_m": (1, 2, 4),
    "warps_k": (1, 2, 4, 8),
    "units": (1, 2, 4, 8),
    "stages": (2, 3, 4, 5, 6, 8),
    "split": (1, 2, 3, 4, 6, 8),
    "wgmma": (0,),
}

_WARPGROUP_CHOICES = {
    "tokens": (*_CHOICES["tokens"], 24, 32),
    "warps_n": (1, 2, 4, 8, 12),
    "wgmma": (0, 1),
}

_IN_FLIGHT = 40 << 10
"""Bytes of the weight that are on their way to a multiprocessor at least: Little's law."""

_PER_THREAD = 1024
"""Codes that a thread of a product with one row decodes at least: more threads, more overhead."""

_PER_BLOCK = 16 << 10
"""Bytes of the weight that a block reads at least where blocks share the work along k."""

_MOST_THREADS = 1024


def tensor_core_spaces(operands: Operands, target: Target) -> Spaces:
    """A `Tile` for each range of rows."""
    one = _fitted(operands, _one_row(operands, target), 1, target)
    spaces = {"1": Space(1, 1, one, _CHOICES)}
    many, special = _MANY[90 if architecture(target) >= 90 else 80], {}
    has_wgmma = has_warpgroup_products(target) and operands.terms == 1 and not operands.is_packed
    if operands.terms > 1:
        many, special = _MANY_TERMS, _FEW_TERMS
    elif _has_long_stages(operands):
        special = _FEW_LONG
    elif _is_int8(operands) and operands.is_grouped:
        special = _INT8_GROUPS
    elif operands.is_grouped and operands.weight.zero_point is not None:
        special = _FLOAT_ZEROS
    if operands.is_quantized and architecture(target) < 90:
        special = {**special, **_LONG_80}
    if _is_int8(operands) and operands.is_grouped:
        many = _MANY[90]
    if operands.is_packed and operands.is_grouped and architecture(target) >= 90:
        special, many = {**special, "33-64": many}, _INT4_GROUPS
    some = {bucket: (most, many) for bucket, most in _SOME.items()}
    for bucket, (most, tile) in {**_FEW, **some}.items():
        tile = _fitted(operands, special.get(bucket, tile), most, target)
        spaces[bucket] = Space(most, most, tile, _CHOICES)
    whole = {**_CHOICES, "split": (1,)}  # sums of parts would take memory without a limit
    spaces["257+"] = Space(None, 1024, _fitted(operands, many, None, target), whole)
    return {**spaces, **(_warpgroup_spaces(operands, spaces, target) if has_wgmma else {})}


def _warpgroup_spaces(operands: Operands, spaces: Spaces, target: Target) -> Spaces:
    """Of sm_90a."""
    found, special = {}, {}
    if operands.is_quantized:
        special = _INT8_WARPGROUPS
    elif operands.weight.group_size < 2 * UNIT:
        special = _SMALL_GROUP_WARPGROUPS
    for bucket, tile in {**_WARPGROUPS, **special}.items():
        most, default = spaces[bucket].most, spaces[bucket].default
        fills = 2 * operands.channel_tiles > tile.channels * WARPGROUP
        if fills:
            default = _fitted(operands, tile, most, target)
        choices = {**spaces[bucket].choices, **_WARPGROUP_CHOICES}
        found[bucket] = replace(spaces[bucket], default=default, choices=choices)
    return found


def distinct(operands: Operands, spaces: Spaces, tiles: Mapping[str, Tile]) -> Spaces:
    """Without buckets whose kernel is that of the next one, which then runs for their rows."""

    def kernel(bucket: str) -> tuple[Tile, Stage]:
        return tiles[bucket], replace(operands, most=spaces[bucket].most).stage(tiles[bucket])

    same = {bucket for bucket, after in pairwise(spaces) if kernel(bucket) == kernel(after)}
    return {bucket: space for bucket, space in spaces.items() if bucket not in same}


def tile_fault(operands: Operands, tile: Tile, target: Target) -> str | None:
    """Why there is no kernel with this tile; None if there is."""
    columns, group = tile.units * UNIT, operands.weight.group_size
    if operands.is_grouped and columns % group:
        return f"units={tile.units} are {columns} columns, no multiple of the group size {group}"
    if tile.threads > _MOST_THREADS:
        return f"{tile.warps} warps are too many"
    if tile.split > 1 and (tile.split - 1) * operands.steps_of_part(tile) >= operands.steps(tile):
        return f"split={tile.split} leaves a block without work along k"
    if tile.wgmma and (fault := _warpgroup_fault(operands, tile, target)):
        return fault
    needed, most = operands.stage(tile).shared_bytes, shared_memory(target)
    if needed > most:
        return f"needs {needed} bytes of shared memory, more than {most}"
    return None


def _warpgroup_fault(operands: Operands, tile: Tile, target: Target) -> str | None:
    """As `tile_fault`, of a tile with `wgmma`."""
    if not has_warpgroup_products(target):
        return "wgmma is there on sm_90a only"
    if operands.terms > 1 or operands.is_packed:
        return f"wgmma multiplies no {'INT4' if operands.is_packed else 'float32'}"
    if tile.warps_m > 1 or tile.warps_n % WARPGROUP:
        return f"wgmma takes {WARPGROUP} warps along channels, and all tokens of a block"
    row = tile.units * operands.unit_bytes
    if row % ROW_BYTES:
        return f"units={tile.units} are {row} bytes of a row, wgmma takes {ROW_BYTES} at a time"
    if tile.tokens not in column_tiles("s8" if operands.is_quantized else str(operands.x.dtype)):
        return f"wgmma has no product of {tile.tokens} tiles of tokens"
    return None


def _one_row(operands: Operands, target: Target) -> Tile:
    """Few threads where there is little work for each, else four warps along k."""
    channels = 2 if operands.channel_tiles >= 4 * multiprocessors(target) else 1
    warps = min(4, channels * operands.units * UNIT // (2 * _PER_THREAD))
    units = 8 if _has_long_stages(operands) else 4
    return Tile(channels, 1, 1, 1, 1 << max(0, warps.bit_length() - 1), units, 16 // units)


def _is_int8(operands: Operands) -> bool:
    return operands.is_quantized and not operands.is_packed


def _has_long_stages(operands: Operands) -> bool:
    """Copies of zero points of groups cost less in them; where INT4 activations become INT8, ptxas
    needs fewer registers."""
    if not operands.is_quantized or not operands.is_grouped:
        return False
    becomes_int8 = operands.is_packed and not operands.has_int4_products
    return operands.weight.zero_point is not None or becomes_int8


def _fitted(operands: Operands, tile: Tile, most: int | None, target: Target) -> Tile:
    """A tile no larger than the weight, nor with warps that have no rows, with blocks for all
    multiprocessors where rows are few."""
    operands = replace(operands, most=most)
    while most is not None and tile.warps_m > 1 and tile.block_tokens // 2 >= most:
        tile = replace(tile, warps_m=tile.warps_m // 2)
    while tile.warps_n > 1 and tile.channel_tiles // 2 >= operands.channel_tiles:
        tile = replace(tile, warps_n=tile.warps_n // 2)
    while tile.warps_k > 1 and tile.step_units > operands.units:
        tile = replace(tile, warps_k=tile.warps_k // 2)
    while tile.tokens > 1 and tile_fault(operands, tile, target):
        tile = _less_memory(tile)
    if most is None:
        return tile  # there are blocks enough: what more stages take, another block needs
    tile = replace(tile, split=_split(operands, tile, target))
    return _with_stages(operands, tile, target)


def _less_memory(tile: Tile) -> Tile:
    if tile.stages > _CHOICES["stages"][0]:
        return replace(tile, stages=tile.stages - 1)
    if tile.warps_m > 1:
        return replace(tile, warps_m=tile.warps_m // 2)
    return replace(tile, tokens=tile.tokens // 2)


def _split(operands: Operands, tile: Tile, target: Target) -> int:
    """The fewest blocks along k that keep all multiprocessors busy, each with enough to do."""
    blocks = _blocks(operands, tile)
    most = operands.units * tile.channel_tiles * UNIT_BYTES // _PER_BLOCK
    for split in _CHOICES["split"]:
        more = replace(tile, split=split)
        if split > 1 and (split > most or tile_fault(operands, more, target)):
            continue
        best = split
        if blocks * split >= multiprocessors(target) - 4:
            break
    return best


def _blocks(operands: Operands, tile: Tile) -> int:
    """In one part along k, of the most rows that there are; of one tile of tokens if any number."""
    down = -(-(operands.most or 1) // tile.block_tokens)
    return down * -(-operands.channel_tiles // tile.channel_tiles)


def _with_stages(operands: Operands, tile: Tile, target: Target) -> Tile:
    """As many stages as keep enough of the weight on its way, of those that fit."""
    blocks = _blocks(operands, tile) * tile.split
    share = operands.channel_tiles * operands.units * UNIT_BYTES // multiprocessors(target)
    at_once = -(-blocks // multiprocessors(target))
    per_stage = tile.channel_tiles * tile.step_units * UNIT_BYTES
    best = tile  # if the fewest do not fit, the rule says so
    for stages in _CHOICES["stages"]:
        more = replace(tile, stages=stages)
        if tile_fault(operands, more, target):
            break
        best = more
        if stages >= tile.stages and (stages - 1) * per_stage * at_once >= min(
            _IN_FLIGHT, share // 2
        ):
            break
    return best
