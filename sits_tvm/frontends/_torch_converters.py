"""Our converters, where TVM's importer is missing one or its own is wrong.

Each takes a node of the exported graph and the importer: ``importer.env`` maps nodes to Relax
expressions, ``importer.block_builder`` emits. ``node.meta["val"]`` is torch's word on the result.
Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op as R

from relax_passes.op.attention import attention

from ._torch_arithmetic import ARITHMETIC
from ._torch_helpers import (
    Node,
    arg,
    cast,
    emit,
    leading_ones,
    scaled,
)
from ._torch_indexing import INDEXING
from ._torch_quantize import QUANTIZE

# Matrix products: TVM's importer computes them all in float32, whatever the dtype of the model.


def _matmul(node: Node, imp: Any) -> relax.Expr:
    return emit(imp, R.matmul(imp.env[node.args[0]], imp.env[node.args[1]]))


def _linear(node: Node, imp: Any) -> relax.Expr:
    x, weight, *bias = (imp.env[a] for a in node.args if a is not None)
    axes = None if weight.ty.ndim == 2 else [0]
    out = emit(imp, R.matmul(x, emit(imp, R.permute_dims(weight, axes))))
    return emit(imp, R.add(out, bias[0])) if bias else out


def _addmm(node: Node, imp: Any) -> relax.Expr:
    """beta · x + alpha · a b; beta = 0 ignores x, as torch does."""
    x, a, b = (imp.env[arg] for arg in node.args[:3])
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    product = scaled(imp, emit(imp, R.matmul(a, b)), alpha)
    if beta != 0:
        return emit(imp, R.add(scaled(imp, x, beta), product))
    return product


def _attention(node: Node, imp: Any) -> relax.Expr:
    """`scaled_dot_product_attention` of rank 2 to 4 as `relax.sits.attention`."""
    q, k, v = (imp.env[arg] for arg in node.args[:3])
    mask, dropout, is_causal = (arg(node, i, n, d) for i, n, d in _SDPA_ARGS)
    scale, grouped = node.kwargs.get("scale"), node.kwargs.get("enable_gqa", False)
    if dropout:
        raise ValueError(f"dropout_p={dropout} acts at random; call model.eval() before the export")
    ranks = {x.ty.ndim for x in (q, k, v)}
    if len(ranks) > 1 or not ranks <= {2, 3, 4}:
        raise ValueError(f"q, k, v of ranks {sorted(ranks)}; write rank 4, (B, H, S, D)")
    q, k, v = (leading_ones(imp, x, 4 - x.ty.ndim) for x in (q, k, v))
    if not grouped and not tvm.sym.Analyzer().can_prove_equal(q.ty.shape[1], k.ty.shape[1]):
        raise ValueError("q and k have different numbers of heads, and enable_gqa is False")
    out = attention(
        q,
        k,
        v,
        imp.env[mask] if mask is not None else None,
        scale=scale,
        causal=0 if is_causal else None,
        empty_row="zero",
    )
    rank = ranks.pop()
    return emit(imp, out) if rank == 4 else emit(imp, R.squeeze(emit(imp, out), [0, 1][: 4 - rank]))


_SDPA_ARGS = ((3, "attn_mask", None), (4, "dropout_p", 0.0), (5, "is_causal", False))


def _layer_norm(node: Node, imp: Any) -> tuple[relax.Expr, None, None]:
    """`native_layer_norm` without its statistics; bfloat16 runs in float32, TVM lacks it."""
    x = imp.env[node.args[0]]
    weight, bias = (None if arg is None else imp.env[arg] for arg in node.args[2:4])
    axes, dtype = list(range(-len(node.args[1]), 0)), str(x.ty.dtype)
    wide = "float32" if dtype == "bfloat16" else dtype
    shape = list(x.ty.shape)[axes[0] :]
    gamma = emit(imp, R.ones(shape, wide)) if weight is None else cast(imp, weight, wide)
    beta = emit(imp, R.zeros(shape, wide)) if bias is None else cast(imp, bias, wide)
    norm = R.nn.layer_norm(cast(imp, x, wide), gamma, beta, axes, node.args[4])
    return cast(imp, emit(imp, norm), dtype), None, None


def _detach(node: Node, imp: Any) -> relax.Expr:
    """A stopped gradient; a build removes it."""
    x = imp.env[node.args[0]]
    return emit(imp, R.grad.no_grad(x)) if node.meta["val"].is_floating_point() else x


# Modes that change what an op does.


def _identity_unless_training(node: Node, imp: Any) -> relax.Expr:
    probability, training = arg(node, 1, "p", 0.5), arg(node, 2, "train", False)
    if training and probability:
        raise ValueError(f"dropout of p={probability} in training mode; call model.eval() before")
    return imp.env[node.args[0]]


def _refuse_random(node: Node, imp: Any) -> relax.Expr:
    raise ValueError("a random result cannot be compiled; pass it as an input")


CONVERTERS: dict[str, Callable[[Node, Any], Any]] = {
    **ARITHMETIC,
    **INDEXING,
    **QUANTIZE,
    "matmul.default": _matmul,
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "mv.default": _matmul,
    "dot.default": _matmul,
    "linear.default": _linear,
    "addmm.default": _addmm,
    "baddbmm.default": _addmm,
    "native_layer_norm.default": _layer_norm,
    "scaled_dot_product_attention.default": _attention,
    "detach.default": _detach,
    "dropout.default": _identity_unless_training,
    "native_dropout.default": _identity_unless_training,
    **dict.fromkeys(("bernoulli.p", "randn.default", "randn_like.default"), _refuse_random),
}
