"""Attention kernels for sm_90, inputs for them, and what they mean in float64 NumPy."""

import numpy as np
from tvm import relax, tirx

from relax_passes.op import attention
from sits_tvm import parse_target
from tir_schedules.attention_cuda import cuda_attention
from tir_schedules.attention_spec import attention_spec

TARGET = parse_target("cuda -arch=sm_90")
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def spec_of(types, **attributes):
    """Of a call on q, k, v and perhaps a bias, each (shape, dtype)."""
    names = ("q", "k", "v", "bias")
    args = [relax.Var(n, relax.TensorType(*t)) for n, t in zip(names, types, strict=False)]
    return attention_spec(relax.BlockBuilder().normalize(attention(*args, **attributes)))


def kernel(types, **attributes):
    func = cuda_attention(spec_of(types, **attributes), TARGET)
    assert isinstance(func, tirx.PrimFunc), func
    return func


def static_types(arrays):
    return [(array.shape, array.dtype.name) for array in arrays]


def symbolic_types(heads=(4, 2), width=32, value_width=None, dtype="float16", bias=None):
    """Types of `inputs` with B, Sq and Sk unknown."""
    batch, queries, keys = (tirx.Var(name, "int64") for name in ("b", "s", "t"))
    return [
        (shape, bias[1] if i == 3 else dtype)
        for i, shape in enumerate(
            _shapes((batch, queries, keys), heads, width, value_width or width, bias)
        )
    ]


def inputs(rng, shape, heads=(4, 2), width=32, value_width=None, dtype="float16", bias=None):
    """q, k, v and, for `bias` = ("b1qk", dtype), a bias that shows 6 of 10 keys."""
    *shapes, last = _shapes(shape, heads, width, value_width or width, bias or ("", ""))
    arrays = [rng.standard_normal(size).astype(dtype) for size in shapes]
    if bias is None:
        return arrays
    shown = rng.random(last) < 0.6
    values = np.where(shown, rng.standard_normal(last), -np.inf)
    return [*arrays, shown if bias[1] == "bool" else values.astype(bias[1])]


def _shapes(lengths, heads, width, value_width, bias):
    (batch, queries, keys), (q_heads, kv_heads) = lengths, heads
    shapes = [
        (batch, q_heads, queries, width),
        (batch, kv_heads, keys, width),
        (batch, kv_heads, keys, value_width),
    ]
    extent = {"b": batch, "h": q_heads, "q": queries, "k": keys, "1": 1}
    return shapes if bias is None else [*shapes, tuple(extent[axis] for axis in bias[0])]


def run(compiled, arrays):
    q, v = arrays[0], arrays[2]
    out = np.full((*q.shape[:3], v.shape[3]), 7, q.dtype)
    compiled(*arrays, out)
    return out


def assert_close(out, arrays, **attributes):
    """Within the rounding of weights and result to the dtype: 2 u of the sum of magnitudes."""
    q, k, v, *bias = arrays
    expected = reference(q, k, v, *bias, **attributes)
    magnitude = reference(q, k, np.abs(v), *bias, **attributes)
    lost = 2.0**-25 * np.abs(v.astype("float64")).sum()  # weights below the least float16
    out = out.astype("float64")
    assert np.array_equal(np.isnan(out), np.isnan(expected))
    excess = np.nan_to_num(np.abs(out - expected) - 2.1 * _UNIT[q.dtype.name] * magnitude)
    assert (excess <= lost).all(), excess.max()


def reference(q, k, v, bias=None, *, scale=None, softcap=0.0, empty_row="nan", **positions):
    """softmax(cap(scale · q kᵀ) + bias, hidden) v, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype("float64") for x in (q, k, v))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    with np.errstate(invalid="ignore"):
        scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    if bias is not None and bias.dtype != bool:
        scores = scores + bias.astype("float64")
    visible = _visible(q.shape[2], k.shape[2], **positions)
    if bias is not None and bias.dtype == bool:
        visible = visible & bias
    weights, is_empty = _softmax(np.where(visible, scores, -np.inf), empty_row)
    empty = {"nan": np.nan, "zero": 0.0, "uniform": np.nan}[empty_row]
    return np.where(is_empty, empty, weights @ v)


def _visible(queries, keys, causal=None, window=0):
    offset = keys - queries if causal == "bottom_right" else (causal or 0)
    ahead = np.arange(keys) - np.arange(queries)[:, None] - offset
    return (ahead <= (keys + queries if causal is None else 0)) & (ahead > -(window or np.inf))


def _softmax(scores, empty_row):
    if empty_row == "uniform":
        scores = np.where(scores == -np.inf, float(np.finfo("float32").min), scores)
    highest = scores.max(3, keepdims=True, initial=-np.inf)
    is_empty = highest == -np.inf
    weights = np.exp(scores - np.where(is_empty, 0.0, highest))
    return weights / np.where(is_empty, 1.0, weights.sum(3, keepdims=True)), is_empty
