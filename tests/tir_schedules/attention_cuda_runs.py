"""Attention kernels for sm_90, inputs for them, and how near they must come."""

import numpy as np
from attention_runs import call, reference
from tvm import tirx

from sits_tvm import parse_target
from tir_schedules.attention.rule import Attention, attention_kernel
from tir_schedules.attention.spec import attention_spec

TARGET = parse_target("cuda -arch=sm_90")
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def spec_of(types, **attributes):
    """Of a call on q, k, v and perhaps a bias, each (shape, dtype)."""
    return attention_spec(call(types, **attributes))


def kernel(types, **attributes):
    func = attention_kernel(call(types, **attributes), TARGET)
    assert isinstance(func, tirx.PrimFunc), func
    return Attention().apply(func, TARGET, False).mod["main"]


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
    """Within the rounding of weights and result to the dtype: 2 u of the sum of magnitudes.

    Of float32, where 2 u is as little, a score may be off by 2⁻²² of the sum that it is; that
    changes its weight by as large a part.
    """
    q, k, v, *bias = arrays
    expected = reference(q, k, v, *bias, **attributes)
    magnitude = reference(q, k, np.abs(v), *bias, **attributes)
    unit = _UNIT[q.dtype.name]
    unit += 2.0**-22 * _largest_score(q, k, **attributes) if q.dtype == "float32" else 0.0
    least = 2.0**-25 if q.dtype == "float16" else 0.0  # weights below are 0
    lost = least * np.abs(v.astype("float64")).sum()
    out = out.astype("float64")
    assert np.array_equal(np.isnan(out), np.isnan(expected))
    excess = np.nan_to_num(np.abs(out - expected) - 2.1 * unit * magnitude)
    assert (excess <= lost).all(), excess.max()


def _largest_score(q, k, scale=None, softcap=0.0, **_):
    k = np.repeat(np.abs(k.astype("float64")), q.shape[1] // k.shape[1], 1)
    products = np.abs(q.astype("float64")) @ k.swapaxes(2, 3)
    scale = q.shape[3] ** -0.5 if scale is None else abs(scale)
    return max(scale * products.max(initial=0.0), softcap)
