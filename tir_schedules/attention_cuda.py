"""Attention fused into one kernel for NVIDIA GPUs from sm_80 on, both products on tensor cores.

A block keeps 64 rows of results in registers and walks over tiles of keys: scores by `mma`, online
softmax in float32, results by `mma`. Keys of the next tile, and values of this one, arrive
in shared memory by `cp.async` meanwhile. Tiles that the causal mask or the window hides from
all rows of the block are not visited. Needs no memory beyond its arguments.
"""

from __future__ import annotations

import re

from tvm import tirx
from tvm.target import Target
from tvm.tirx.script import builder as T

from .attention_cuda_block import Block, Tiling, launch
from .attention_cuda_ptx import (
    commit_copies,
    load_matrices,
    multiply_add,
    pack,
    store_pair,
    synchronize,
    wait_for_copies,
)
from .attention_cuda_softmax import Softmax, local
from .attention_spec import AttentionSpec
from .emit import when, with_emitted_body

_WIDEST = 256


def cuda_attention(spec: AttentionSpec, target: Target) -> tirx.PrimFunc | str:
    """The kernel of `spec`, or why there is none.

    What a hidden key holds does not matter. An Inf or NaN among its values makes rows NaN that
    see other keys of its tile, as 0 · v does in the plain form.

    Parameters
    ----------
    spec : AttentionSpec
        float16 or bfloat16, D and Dv multiples of 16 up to 256.
    target : Target
        Of kind cuda, sm_80 or newer.

    Returns
    -------
    PrimFunc or str
        Of ``spec.arguments``. 128 threads per block; grid (max(B · G, 1), rows / 64).
    """
    refusal = _refusal(spec, target)
    if refusal is not None:
        return refusal
    func = tirx.PrimFunc(spec.arguments, tirx.Evaluate(0))
    return with_emitted_body(func, lambda: _emit(spec)).with_attr("tirx.noalias", True)


def _refusal(spec: AttentionSpec, target: Target) -> str | None:
    arch = str(target.attrs.get("arch", ""))
    number = re.search(r"\d+", arch)
    if number is None or int(number[0]) < 80:
        return f"{arch or target.kind.name} has no mma of 16 x 8 x 16; the kernel takes sm_80 on"
    if spec.dtype not in ("float16", "bfloat16"):
        return f"q, k and v are {spec.dtype}; tensor cores take float16 and bfloat16"
    for name, width in {"D": spec.head_dim, "Dv": spec.value_dim}.items():
        if width % 16 or width > _WIDEST:
            return f"{name}={width} is no multiple of 16 up to {_WIDEST}"
    needed, most = 2 * Tiling(spec).elements, target.attrs.get("max_shared_memory_per_block")
    if most is not None and needed > int(most):
        return f"needs {needed} bytes of shared memory, more than the {int(most)} of {arch}"
    return None


def _emit(spec: AttentionSpec) -> None:
    with launch(spec) as block:
        softmax = Softmax.allocate(block)
        results = local(spec.value_dim // 2, value=0.0)
        tiles = local(2, "int64")  # registers, else TVM takes minutes over the bounds of the loop
        for i, bound in enumerate(block.key_tiles()):
            T.buffer_store(tiles, bound, [i])
        first, stop = tiles[0], tiles[1]
        block.load_queries()
        block.load_keys(first * block.tiling.keys)
        commit_copies()
        queries = local(spec.head_dim // 4 if block.tiling.holds_queries else 4, "uint32")
        if block.tiling.holds_queries:
            wait_for_copies()
            with T.unroll(spec.head_dim // 16) as step:
                _load_query(block, queries, step * 4, step)
        with T.serial(first, stop) as tile:
            _visit(block, softmax, queries, results, tile, stop)
        _store(block, softmax, results)


def _visit(
    block: Block,
    softmax: Softmax,
    queries: tirx.Buffer,
    results: tirx.Buffer,
    tile: tirx.Expr,
    stop: tirx.Expr,
) -> None:
    """One tile of keys."""
    first_key = tile * block.tiling.keys
    wait_for_copies()  # keys of this tile; and no warp reads values of the last one any more
    block.load_values(first_key)
    commit_copies()
    _score(block, queries, softmax.scores)
    synchronize()  # no warp reads the keys any more
    with when(tile + 1 < stop):
        block.load_keys(first_key + block.tiling.keys)
    commit_copies()
    softmax.weigh(first_key)
    _decay(softmax, results)
    wait_for_copies(pending=1)  # the values
    _accumulate(block, softmax.scores, results)


def _load_query(block: Block, queries: tirx.Buffer, at: tirx.Expr | int, step: tirx.Expr) -> None:
    """16 of the head's dimensions of this warp's rows, as a left factor."""
    row, column = block.warp * 16 + block.lane % 16, step * 16 + block.lane // 16 * 8
    load_matrices(queries, at, block.shared, row * block.tiling.pitch + column)


def _score(block: Block, queries: tirx.Buffer, scores: tirx.Buffer) -> None:
    """scores = q kᵀ."""
    keys, lane, tiling = local(4, "uint32"), block.lane, block.tiling
    with T.unroll(tiling.keys // 2) as i:
        T.buffer_store(scores, tirx.const(0.0, "float32"), [i])
    with T.unroll(block.spec.head_dim // 16) as step:
        at = step * 4 if tiling.holds_queries else 0
        if not tiling.holds_queries:
            _load_query(block, queries, at, step)
        with T.unroll(tiling.keys // 16) as n:
            key, column = n * 16 + lane // 16 * 8 + lane % 8, step * 16 + lane // 8 % 2 * 8
            load_matrices(keys, 0, block.shared, key * tiling.pitch + column + tiling.first_key)
            _multiply_pair(block, scores, n, [queries[at + i] for i in range(4)], keys)


def _decay(softmax: Softmax, results: tirx.Buffer) -> None:
    with T.unroll(int(results.shape[0]) // 4) as n, T.unroll(2) as half, T.unroll(2) as e:
        at = n * 4 + half * 2 + e
        T.buffer_store(results, results[at] * softmax.decay[half], [at])


def _accumulate(block: Block, weights: tirx.Buffer, results: tirx.Buffer) -> None:
    """results += weights · v: the weights of 16 keys, as `mma` left them, are a left factor."""
    packed, values = local(4, "uint32"), local(4, "uint32")
    lane, tiling, dtype = block.lane, block.tiling, block.spec.dtype
    with T.unroll(tiling.keys // 16) as step:
        for i in range(4):
            pack(packed[i], weights[step * 8 + 2 * i], weights[step * 8 + 2 * i + 1], dtype)
        with T.unroll(block.spec.value_dim // 16) as n:
            key, column = step * 16 + lane % 16, n * 16 + lane // 16 * 8
            at = key * tiling.value_pitch + column + tiling.first_value
            load_matrices(values, 0, block.shared, at, transposed=True)
            _multiply_pair(block, results, n, [packed[i] for i in range(4)], values)


def _multiply_pair(
    block: Block, product: tirx.Buffer, n: tirx.Expr, left: list[tirx.Expr], right: tirx.Buffer
) -> None:
    """Columns 16 n to 16 n + 15 of a product, of two right factors in four registers."""
    for i in range(2):
        factor = [right[2 * i], right[2 * i + 1]]
        multiply_add(product, n * 8 + i * 4, left, factor, block.spec.dtype)


def _store(block: Block, softmax: Softmax, results: tirx.Buffer) -> None:
    """Each lane has two neighbours of every eight values of its two rows."""
    spec, packed = block.spec, local(1, "uint32")
    softmax.total()
    with T.unroll(2) as half, when(block.row(half) < block.num_rows):
        head, query = block.head_and_query(block.row(half))
        with T.unroll(spec.value_dim // 8) as n:
            at = n * 4 + half * 2
            left, right = (softmax.normalized(results[at + e], half) for e in range(2))
            pack(packed[0], left, right, spec.dtype)
            column = T.Cast("int64", n * 8 + block.lane % 4 * 2)
            store_pair(T.address_of(spec.out[block.batch, head, query, column]), packed[0])
