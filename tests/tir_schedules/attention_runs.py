"""Calls of relax.sits.attention, their kernels, and what they mean in float64 NumPy."""

import numpy as np
import tvm
from kernel_runs import target
from tvm import relax, tirx

from relax_passes.op import attention
from tir_schedules.attention.rule import Attention, attention_kernel
from tir_schedules.records.space import with_parameters


def call(types, **attributes):
    """The op of q, k, v and perhaps bias, given as (shape, dtype)."""
    args = [
        relax.Var(name, relax.TensorType(shape, dtype))
        for name, (shape, dtype) in zip(("q", "k", "v", "bias"), types, strict=False)
    ]
    return relax.BlockBuilder().normalize(attention(*args, **attributes))


def symbolic_types(arrays):
    """Types of the arrays, with B, Sq and Sk symbolic."""
    b, s, t = (tirx.Var(name, "int64") for name in "bst")
    q, k, v, *biases = arrays
    shapes = [(b, x.shape[1], n, x.shape[3]) for x, n in ((q, s), (k, t), (v, t))]
    for bias in biases:
        scores = (b, q.shape[1], s, t)[4 - bias.ndim :]
        shapes.append([1 if n == 1 else x for n, x in zip(bias.shape, scores, strict=True)])
    return [(shape, x.dtype.name) for shape, x in zip(shapes, arrays, strict=True)]


def static_types(arrays):
    return [(x.shape, x.dtype.name) for x in arrays]


def compile_attention(types, name="host", parameters=None, **attributes):
    """``run(*arrays) -> out`` of the kernel for a target of `kernel_runs`."""
    func = attention_kernel(call(types, **attributes), target(name))
    assert isinstance(func, tirx.PrimFunc), func
    func = with_parameters(func, parameters or {}).with_attr("global_symbol", "main")
    mod = Attention().apply(func, target(name), False).mod
    kernel = tvm.compile(mod, target=target(name))["main"]

    def run(*arrays):
        q, v = arrays[0], arrays[2]
        out = tvm.runtime.tensor(np.full((*q.shape[:3], v.shape[3]), 7, q.dtype))
        kernel(*(tvm.runtime.tensor(np.asarray(x, order="C")) for x in arrays), out)
        return out.numpy()

    return run


def reference(
    q, k, v, bias=None, *, scale=None, causal=None, window=0, softcap=0.0, empty_row="nan"
):
    """The op in float64. A hidden key is left out of sums, whatever it and its value hold."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (np.asarray(x, "float64") for x in (q, k, v))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    visible = np.broadcast_to(_positions(q.shape[2], k.shape[2], causal, window), scores.shape)
    if bias is not None and bias.dtype == bool:
        visible = visible & bias
    elif bias is not None:
        scores = scores + np.asarray(bias, "float64")
        visible = visible & ~np.isneginf(np.asarray(bias, "float64"))
    if k.shape[2] == 0:
        return np.full((*q.shape[:3], v.shape[3]), 0.0 if empty_row == "zero" else np.nan)
    weights = _softmax(np.where(visible, scores, -np.inf), empty_row)
    if empty_row == "uniform":
        return weights @ v
    return (weights[..., None] * np.where(visible[..., None], v[:, :, None], 0.0)).sum(3)


def _positions(queries, keys, causal, window):
    offset = keys - queries if causal == "bottom_right" else (causal or 0)
    distance = np.arange(queries)[:, None] + offset - np.arange(keys)
    seen = distance >= 0 if causal is not None else np.ones(distance.shape, bool)
    return seen & (distance < window) if window else seen


def _softmax(scores, empty_row):
    if empty_row == "uniform":
        scores = np.maximum(scores, np.finfo("float32").min)
    largest = scores.max(3, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(largest), 0.0, largest))
    total = weights.sum(3, keepdims=True)
    if empty_row == "zero":
        return np.where(total == 0, 0.0, weights / np.where(total == 0, 1.0, total))
    with np.errstate(invalid="ignore"):
        return weights / total
