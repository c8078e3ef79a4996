"""The fused attention kernel for CPUs."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.target import Target
from tvm.tirx.script import builder as T

from .attention_cpu_decode import attention_of_few_rows
from .attention_cpu_part import DecodeTile
from .attention_cpu_rows import attention_by_rows
from .attention_cpu_tile import RowTile
from .attention_spec import AttentionSpec
from .contraction import LANES
from .cpu_target import cores, vector_lanes
from .emit import with_emitted_body

_ROW_TILES = {16: RowTile(8, 3, 64), 8: RowTile(4, 1, 64), 4: RowTile(2, 1, 64)}
_DECODE_REGISTERS = {16: 16, 8: 6, 4: 3}
_DECODE_KEYS = 64

_FEW_ROWS = 8
"""With more, lanes that are rows are full enough."""


def cpu_attention(spec: AttentionSpec, target: Target) -> tirx.PrimFunc:
    """The kernel for an llvm target, of `AttentionSpec.arguments`.

    Offset and window skip tiles of keys that they hide; a bias, also a bool one, skips none.
    """
    attrs = {"s_tir": True, "tirx.noalias": True}
    signature = tirx.PrimFunc(spec.arguments, tirx.Evaluate(0)).with_attr(attrs)
    return with_emitted_body(signature, lambda: _any_rows(spec, target))


def _any_rows(spec: AttentionSpec, target: Target) -> None:
    """Few rows and many in forms of their own; a symbolic Sq is looked at at run time."""
    queries, tile = spec.num_queries, _ROW_TILES[vector_lanes(target)]
    if isinstance(queries, tirx.IntImm):
        rows = int(queries) * spec.group
        if 0 < rows <= _FEW_ROWS:
            attention_of_few_rows(spec, _decode_tile(spec, int(queries), target))
        else:
            vectors = max(1, min(tile.vectors, -(-rows // LANES)))
            attention_by_rows(spec, replace(tile, vectors=vectors))
        return
    if spec.group > _FEW_ROWS:
        attention_by_rows(spec, tile)
        return
    with T.If(queries == 1):
        with T.Then():
            attention_of_few_rows(spec, _decode_tile(spec, 1, target))
        with T.Else():
            attention_by_rows(spec, tile)


def _decode_tile(spec: AttentionSpec, queries: int, target: Target) -> DecodeTile:
    heads = spec.num_kv_heads
    if isinstance(spec.batch, tirx.IntImm):
        heads *= max(1, int(spec.batch))
    parts = -(-cores(target) // heads)
    rows = queries * spec.group
    return DecodeTile(rows, _DECODE_REGISTERS[vector_lanes(target)], _DECODE_KEYS, parts)
