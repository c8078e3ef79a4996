"""Attention fused into one kernel for NVIDIA GPUs from sm_80 on.

A block keeps 64 rows of results in registers and walks over tiles of keys: scores, online softmax
in float32, results. The products of float16 and bfloat16 run on tensor cores, those of float32 on
scalar units. Keys of the next tile, and values of this one, arrive in shared memory by `cp.async`
meanwhile. Tiles that the causal mask or the window hides from all rows of the block are not
visited. Needs no memory beyond its arguments.
"""

from __future__ import annotations

from tvm import tirx
from tvm.target import Target
from tvm.tirx.script import builder as T

from ..cuda_ptx import commit_copies, local, synchronize, wait_for_copies
from ..cuda_target import architecture
from ..emit import when, with_emitted_body
from .cuda_block import Block, launch
from .cuda_fma import ScalarProducts
from .cuda_mma import TensorCoreProducts
from .cuda_products import Products
from .cuda_softmax import Softmax
from .cuda_tiling import MOST_BLOCKS, Tiling
from .spec import AttentionSpec

_WIDEST = 256


def cuda_attention(func: tirx.PrimFunc, spec: AttentionSpec) -> tirx.PrimFunc:
    """The kernel of `func`, a `plain_attention` of `spec` that `cuda_refusal` has nothing against.

    128 threads per block; one block per 64 rows and key/value head. Widths are filled up with
    zeros to multiples of 16 in shared memory. Operands are copied 16 bytes at a time where D and
    Dv are multiples of that, else 8 or 4. What a hidden key holds does not matter. An Inf or NaN
    among its values makes rows NaN that see other keys of its tile, as 0 · v does in the plain
    form.
    """
    return with_emitted_body(func, lambda: _emit(spec))


def cuda_refusal(spec: AttentionSpec, target: Target) -> str | None:
    """Why a target of kind cuda has no kernel of `spec`; None if it has.

    It takes D and Dv up to 256, even ones unless it is float32, and sm_80 or newer.
    """
    arch = str(target.attrs.get("arch", ""))
    if architecture(target) < 80:
        return f"{arch or target.kind.name} has no asynchronous copies; the kernel takes sm_80 on"
    tiling = Tiling(spec)
    for name, width in {"D": spec.head_dim, "Dv": spec.value_dim}.items():
        if width > _WIDEST:
            return f"{name}={width} is more than the {_WIDEST} that fit in registers"
        if width * tiling.bytes % 4:
            return f"{name}={width} is odd; rows of {spec.dtype} are then not 4 bytes aligned"
    needed, most = tiling.bytes * tiling.elements, target.attrs.get("max_shared_memory_per_block")
    if most is not None and needed > int(most):
        return f"needs {needed} bytes of shared memory, more than the {int(most)} of {arch}"
    if isinstance(tiling.blocks, tirx.IntImm) and int(tiling.blocks) > MOST_BLOCKS:
        return f"needs {int(tiling.blocks)} blocks, more than the {MOST_BLOCKS} of a grid"
    return None


def _emit(spec: AttentionSpec) -> None:
    with launch(spec) as block:
        softmax, products = Softmax.allocate(block), _products(block)
        tiles = local(2, "int64")  # registers, else TVM takes minutes over the bounds of the loop
        for i, bound in enumerate(block.key_tiles()):
            T.buffer_store(tiles, bound, [i])
        first, stop = tiles[0], tiles[1]
        block.load_queries()
        block.load_keys(first * block.tiling.keys)
        commit_copies()
        products.prepare()
        with T.serial(first, stop) as tile:
            _visit(block, softmax, products, tile, stop)
        softmax.total()
        products.store(softmax)


def _products(block: Block) -> Products:
    kind = ScalarProducts if block.spec.dtype == "float32" else TensorCoreProducts
    return kind.allocate(block)


def _visit(
    block: Block, softmax: Softmax, products: Products, tile: tirx.Expr, stop: tirx.Expr
) -> None:
    """One tile of keys."""
    first_key = tile * block.tiling.keys
    wait_for_copies()  # keys of this tile; and no warp reads values of the last one any more
    block.load_values(first_key)
    commit_copies()
    products.score(softmax.scores)
    synchronize()  # no warp reads the keys any more
    with when(tile + 1 < stop):
        block.load_keys(first_key + block.tiling.keys)
    commit_copies()
    softmax.weigh(first_key)
    products.decay(softmax.decay)
    wait_for_copies(pending=1)  # the values
    products.accumulate(softmax.scores)
