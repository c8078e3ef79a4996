"""Attention blocks with known redundancy in their weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.relax import op as R

from relax_passes.op.attention import attention

Params = dict[str, np.ndarray]


@dataclass(frozen=True)
class Block:
    """Sizes and spelling of one attention block on x (b, s, hidden), weights (N, K) as Linear.

    `padding`: a mask (b, 1, 1, s) is an argument; "per head": one (b, heads, 1, s).
    """

    heads: int = 4
    kv_heads: int = 4
    dim: int = 8
    hidden: int = 24
    bias: bool = True
    rope: bool = False
    packed: bool = False
    causal: int | None = 0
    dtype: str = "float32"
    empty_row: str = "nan"
    padding: bool | str = False

    @property
    def rows(self) -> dict[str, int]:
        kv = self.kv_heads * self.dim
        return {"q": self.heads * self.dim, "k": kv, "v": kv}


def random_params(block: Block, rng: np.random.Generator, layers: int = 1) -> Params:
    """Weights ``<layer>.<q|k|v|o>.weight`` and ``.bias``; a planter edits them before `pack`."""
    params = {}
    for layer in range(layers):
        for name, rows in {**block.rows, "o": block.hidden}.items():
            columns = block.rows["q"] if name == "o" else block.hidden
            weight = rng.standard_normal((rows, columns)) / columns**0.5
            params[f"{layer}.{name}.weight"] = weight.astype(block.dtype)
            if block.bias:
                params[f"{layer}.{name}.bias"] = rng.standard_normal(rows).astype(block.dtype)
    return params


def pack(block: Block, params: Params) -> Params:
    """With q, k, v in one weight each layer, where the block says so."""
    if not block.packed:
        return params
    out = {n: p for n, p in params.items() if n.split(".")[1] == "o"}
    for name in params:
        layer, which, part = name.split(".")
        if which == "q":
            parts = [params[f"{layer}.{x}.{part}"] for x in "qkv"]
            out[f"{layer}.qkv.{part}"] = np.concatenate(parts)
    return out


def module(block: Block, params: Params, layers: int = 1, tied: bool = False) -> IRModule:
    """main(x[, mask], *params): x + attention, layer by layer; `tied`: all with weights 0."""
    bb = relax.BlockBuilder()
    b, s = tvm.tirx.Var("b", "int64"), tvm.tirx.Var("s", "int64")
    x = relax.Var("x", relax.TensorType([b, s, block.hidden], block.dtype))
    shape = [b, block.heads if block.padding == "per head" else 1, 1, s]
    mask = [relax.Var("mask", relax.TensorType(shape, "bool"))] if block.padding else []
    weights = {n: relax.Var(n, relax.TensorType(p.shape, block.dtype)) for n, p in params.items()}
    attrs = {"num_input": 1 + len(mask), "tir_var_lower_bound": {"b": 1, "s": 1}}
    with bb.function("main", [x, *mask, *weights.values()], attrs=attrs):
        with bb.dataflow():
            at = x
            for layer in range(layers):
                prefix = f"{0 if tied else layer}."
                at = bb.emit(R.add(at, _attention(bb, block, at, mask, weights, prefix)))
            at = bb.emit_output(at)
        bb.emit_func_output(at)
    return bb.get()


def _attention(bb, block, x, mask, weights, prefix):
    projected = _projections(bb, block, x, weights, prefix)
    q, k, v = (_heads(bb, block, projected[n]) for n in "qkv")
    if block.rope:
        q, k = _rotated(bb, block, q), _rotated(bb, block, k)
    call = attention(q, k, v, *mask, causal=block.causal, empty_row=block.empty_row)
    out = bb.emit(R.permute_dims(bb.emit(call), [0, 2, 1, 3]))
    batch, length = list(x.ty.shape)[:2]
    out = bb.emit(R.reshape(out, [batch, length, block.rows["q"]]))
    return _linear(bb, out, weights, f"{prefix}o")


def _projections(bb, block, x, weights, prefix):
    if not block.packed:
        return {n: _linear(bb, x, weights, f"{prefix}{n}") for n in "qkv"}
    rows = block.rows
    both = _linear(bb, x, weights, f"{prefix}qkv")
    parts = bb.emit(R.split(both, [rows["q"], rows["q"] + rows["k"]], axis=-1))
    return {n: bb.emit(relax.TupleGetItem(parts, i)) for i, n in enumerate("qkv")}


def _linear(bb, x, weights, name):
    transposed = bb.emit(R.permute_dims(weights[f"{name}.weight"]))
    out = bb.emit(R.matmul(x, transposed))
    bias = weights.get(f"{name}.bias")
    return out if bias is None else bb.emit(R.add(out, bias))


def _heads(bb, block, x):
    batch, length, rows = x.ty.shape
    x = bb.emit(R.reshape(x, [batch, length, int(rows) // block.dim, block.dim]))
    return bb.emit(R.permute_dims(x, [0, -2, 1, 3]))


def _rotated(bb, block, x):
    length, half = x.ty.shape[2], block.dim // 2
    steps = bb.emit(R.astype(bb.emit(R.arange(0, length, 1, "int64")), block.dtype))
    rates = (10.0 ** -np.tile(np.arange(half) / half, 2)).astype(block.dtype)
    angles = bb.emit(R.multiply(bb.emit(R.expand_dims(steps, 1)), relax.const(rates)))
    low = bb.emit(R.strided_slice(x, [3], [0], [half]))
    high = bb.emit(R.strided_slice(x, [3], [half], [block.dim]))
    turned = bb.emit(R.concat([bb.emit(R.negative(high)), low], axis=-1))
    left = bb.emit(R.multiply(x, bb.emit(R.cos(angles))))
    right = bb.emit(R.multiply(turned, bb.emit(R.sin(angles))))
    return bb.emit(R.add(left, right))


# --- planting: edits of the unpacked weights of one layer


def rows_of(block: Block, head: int) -> slice:
    return slice(head * block.dim, (head + 1) * block.dim)


def zero_output(block: Block, params: Params, head: int, layer: int = 0) -> None:
    params[f"{layer}.o.weight"][:, rows_of(block, head)] = 0


def zero_value(block: Block, params: Params, kv_head: int, layer: int = 0) -> None:
    """The bias stays."""
    params[f"{layer}.v.weight"][rows_of(block, kv_head)] = 0


def copy_rows(block, params, name, source, target, scale=1.0, order=None, layer=0) -> None:
    """Row i of the target is `scale[i]` times row `order[i]` of the source."""
    order = np.arange(block.dim) if order is None else order
    factor = np.broadcast_to(np.asarray(scale, block.dtype), block.dim)
    for part in ("weight", "bias") if block.bias else ("weight",):
        array = params[f"{layer}.{name}.{part}"]
        rows = array[rows_of(block, source)][order]
        array[rows_of(block, target)] = rows * (factor[:, None] if part == "weight" else factor)


def low_rank(block: Block, params: Params, name: str, rank: int, rng, layer: int = 0) -> None:
    rows, columns = params[f"{layer}.{name}.weight"].shape
    product = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))
    params[f"{layer}.{name}.weight"] = (product / rank**0.5 / columns**0.5).astype(block.dtype)
