"""The fused attention kernel for CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.target import Target
from tvm.tirx.script import builder as T

from ..contraction import LANES
from ..cpu_target import cores, vector_lanes
from ..emit import with_emitted_body
from ..records.space import Space, Spaces, emit_buckets, reachable
from .cpu_decode import attention_of_few_rows
from .cpu_part import DecodeTile
from .cpu_rows import attention_by_rows
from .cpu_tile import RowTile
from .spec import AttentionSpec

_KEYS = (32, 64, 128, 256)

# By float32 lanes of the target's vector registers.
_ROW_TILES = {16: RowTile(8, 3, 64), 8: RowTile(4, 1, 64), 4: RowTile(2, 1, 64)}
_ROW_CHOICES: dict[int, dict[str, tuple[int, ...]]] = {
    16: {"depth": (4, 6, 8, 12), "vectors": (1, 2, 3, 4), "keys": _KEYS},
    8: {"depth": (2, 3, 4, 6), "vectors": (1, 2, 3), "keys": _KEYS},
    4: {"depth": (1, 2, 3, 4), "vectors": (1, 2), "keys": _KEYS},
}
_DECODE_REGISTERS = {16: 12, 8: 6, 4: 3}
_DECODE_CHOICES: dict[int, dict[str, tuple[int, ...]]] = {
    16: {"registers": (4, 8, 12, 16, 24), "keys": _KEYS},
    8: {"registers": (2, 4, 6, 8), "keys": _KEYS},
    4: {"registers": (1, 2, 3, 4), "keys": _KEYS},
}
_SMALL_QUERIES = 256
"""Floats of all rows up to which several keys at once pay; with more, keys come one by one."""

_FEW_ROWS = 8
"""With more, lanes that are rows are full enough."""


def cpu_spaces(spec: AttentionSpec, target: Target) -> Spaces:
    """By queries: a `DecodeTile` for a number of few rows (one query where it is not known), and a
    `RowTile`."""
    queries, lanes = spec.num_queries, vector_lanes(target)
    few = int(queries) if isinstance(queries, tirx.IntImm) else 1
    many = "2+" if spec.group <= _FEW_ROWS else "1+"
    spaces = {many: Space(None, 512, _ROW_TILES[lanes], _ROW_CHOICES[lanes])}
    if 0 < few * spec.group <= _FEW_ROWS:
        tile = _decode_tile(spec, few, target)
        spaces = {str(few): Space(few, few, tile, _DECODE_CHOICES[lanes]), **spaces}
    return reachable(queries, spaces)


def cpu_attention(
    func: tirx.PrimFunc, spec: AttentionSpec, spaces: Spaces, parameters: dict[str, Any]
) -> tirx.PrimFunc:
    """The kernel of `func`, a `plain_attention` of `spec`, for an llvm target.

    Offset and window skip tiles of keys that they hide; a bias, also a bool one, skips none.
    """

    def emit(bucket: str) -> None:
        _emit(spec, parameters[bucket])

    return with_emitted_body(func, lambda: emit_buckets(spec.num_queries, spaces, emit))


def _emit(spec: AttentionSpec, tile: DecodeTile | RowTile) -> None:
    if isinstance(tile, DecodeTile):
        attention_of_few_rows(spec, tile)
        return
    if isinstance(spec.num_queries, tirx.IntImm):
        rows = int(spec.num_queries) * spec.group
        if rows == 0:
            T.evaluate(0)
            return
        tile = replace(tile, vectors=min(tile.vectors, -(-rows // LANES)))
    attention_by_rows(spec, tile)


def _decode_tile(spec: AttentionSpec, queries: int, target: Target) -> DecodeTile:
    heads = spec.num_kv_heads
    if isinstance(spec.batch, tirx.IntImm):
        heads *= max(1, int(spec.batch))
    parts = -(-cores(target) // heads)
    rows = queries * spec.group
    per_row = 4 if rows * spec.head_dim <= _SMALL_QUERIES else 1
    registers = min(rows * per_row, _DECODE_REGISTERS[vector_lanes(target)])
    return DecodeTile(rows, registers, 32 if spec.head_dim <= 64 else 128, parts)
