"""What a tuning record of attention is of, and back to a PrimFunc."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ..emit import Index, int64
from ..records.space import Excerpt
from ..records.workloads import ATTENTION, AttentionWorkload
from .cpu_scores import bias_differs_by_row
from .plain import plain_attention
from .spec import AttentionSpec

_KEYS = 1024


def workload_of(spec: AttentionSpec) -> AttentionWorkload:
    return AttentionWorkload(
        family=ATTENTION,
        num_heads=spec.num_kv_heads * spec.group,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        dtype=spec.dtype,
        causal=spec.causal is not None,
        window=spec.window,
        softcap=spec.softcap,
        bias="" if spec.bias is None else str(spec.bias.dtype),
        by_row=bias_differs_by_row(spec),
    )


def prim_func(workload: AttentionWorkload, rows: int | None) -> tirx.PrimFunc:
    """`rows` queries, the last of 1024 positions, whose keys are all there; a batch of one."""
    queries = tirx.Var("num_queries", "int64") if rows is None else rows
    shapes = [[int64(extent) for extent in shape] for shape in _shapes(workload, queries)]
    (q, k, v), biases = shapes[:3], shapes[3:]
    dtype = workload.dtype
    spec = AttentionSpec(
        q=tirx.decl_buffer(q, dtype, "q"),
        k=tirx.decl_buffer(k, dtype, "k"),
        v=tirx.decl_buffer(v, dtype, "v"),
        out=tirx.decl_buffer([*q[:3], v[3]], dtype, "out"),
        bias=tirx.decl_buffer(biases[0], workload.bias, "bias") if biases else None,
        scale=workload.head_dim**-0.5,
        causal="bottom_right" if workload.causal else None,
        window=workload.window,
        softcap=workload.softcap,
        empty_row="nan",
    )
    return plain_attention(spec).with_attr("global_symbol", "main")


def inputs(workload: AttentionWorkload, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Arguments of `prim_func`, from a normal distribution.

    A bool bias shows 9 of 10 keys, and each query its own: else a narrow window could be empty.
    """
    arrays = [rng.standard_normal(shape, "float32") for shape in _shapes(workload, rows)]
    operands = [x.astype(workload.dtype) for x in arrays[:3]]
    if workload.bias == "bool":
        shown = arrays[3] > -1.3
        shown[..., -rows:] = True
        return [*operands, shown]
    return [*operands, *(x.astype(workload.bias) for x in arrays[3:])]


def excerpt(workload: AttentionWorkload, rows: int, inputs: list[np.ndarray]) -> Excerpt:
    """All of it: queries depend on their position."""
    return Excerpt(prim_func(workload, rows), inputs, [0], _KEYS + workload.head_dim)


def _shapes(workload: AttentionWorkload, queries: Index) -> list[list[Index]]:
    """Of q, k, v and the bias."""
    heads, kv_heads, width = workload.num_heads, workload.num_kv_heads, workload.head_dim
    shapes = [
        [1, heads, queries, width],
        [1, kv_heads, _KEYS, width],
        [1, kv_heads, _KEYS, workload.value_dim],
    ]
    bias = [[1, 1, queries if workload.by_row else 1, _KEYS]]
    return shapes + bias if workload.bias else shapes
