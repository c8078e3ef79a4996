"""INT4 products for sm_90 as CUDA text that runs on the host, and what they compute in float64."""

import json
from dataclasses import asdict

import ml_dtypes  # noqa: F401  NumPy's bfloat16
import numpy as np
from cuda_text import CudaText
from int8_runs import as_words, group_sums, product, quantized, random_weight

from sits_tvm import parse_target
from sits_tvm.config import QuantSpec
from tir_schedules.int4_format.packing import PackedLayout, unpack
from tir_schedules.matmul.int4_matmul import int4_matmul
from tir_schedules.matmul.int8_matmul import int8_matmul
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.matmul_cuda.tile import Tile

TARGET = parse_target("cuda -arch=sm_90")
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def layout_of(n, k, activation=None, **spec):
    return PackedLayout(n, k, QuantSpec(activation=activation, **spec), "fragments")


def plain(layout, rows, dtype="float16"):
    """The function without a schedule; of quantized activations it gives float32."""
    if layout.spec.activation in ("int8", "int4"):
        return int8_matmul(rows, layout, "float32")
    return int4_matmul(rows, layout.n, layout.k, layout.spec, dtype, layout.order)


def scheduled(func, target=TARGET, **tiles):
    """The function as the rule schedules it, with `tiles` as tuples, by bucket."""
    given = {bucket.replace("_", "-"): asdict(Tile(*tile)) for bucket, tile in tiles.items()}
    func = func.with_attr("sits.parameters", json.dumps(given)) if given else func
    schedule = TensorCoreMatmul().apply(func, target, False)
    assert schedule is not None, "TensorCoreMatmul declined"
    return schedule.mod["main"]


def activations(rng, rows, layout, dtype="float16"):
    """Arguments that stand for X, and what they stand for in float64."""
    x = rng.standard_normal((rows, layout.k))
    if layout.spec.activation not in ("int8", "int4"):
        x = x.astype(dtype)
        return [x], x.astype("float64")
    codes, scale = quantized(x.astype("float32"), layout)
    words, sums = as_words(codes, layout), group_sums(codes, layout).astype("int32")
    return [words, scale, sums], (codes, scale)


def weight(rng, layout):
    codes, scale, *zero = random_weight(rng, layout)
    return [codes, np.abs(scale) / 64, *zero]


def run(compiled, x, parts, layout, dtype="float16"):
    out_dtype = "float32" if layout.spec.activation in ("int8", "int4") else dtype
    out = np.full((len(x[0]), layout.n), np.nan, out_dtype)
    compiled(*x, *(part.astype(d) for part, d in zip(parts, layout.dtypes, strict=True)), out)
    return out


def assert_close(out, x, parts, layout):
    """Within one rounding to the dtype, and of float32 sums 2e-6 of the sum of magnitudes."""
    w = unpack(tuple(parts), layout).astype("float64")
    if layout.spec.activation in ("int8", "int4"):
        expected, _ = product(*x, parts, layout)
        codes, scale = x
        each = layout.padded_k // scale.shape[1]
        x = codes * np.repeat(scale.astype("float64"), each, axis=1)[:, : layout.k]
    else:
        expected = x @ w.T
    magnitude = np.abs(x) @ np.abs(w).T
    assert out.shape == expected.shape
    assert np.isfinite(out.astype("float32")).all()
    least = 2.0**-25 if out.dtype == "float16" else 1e-30  # half of the smallest float16
    bound = 2e-6 * magnitude + _UNIT[out.dtype.name] * np.abs(expected) + least
    excess = np.abs(out.astype("float64") - expected) - bound
    assert (excess <= 0).all(), f"off by {(excess + bound).max()}, allowed {bound.max()}"


def check(layout, rows, dtype="float16", seed=0, target=TARGET, **tiles):
    """Run at each of `rows`, by one function with a symbolic number, or static for an int."""
    rng = np.random.default_rng(seed)
    static = rows if isinstance(rows, int) else None
    compiled = CudaText(scheduled(plain(layout, static, dtype), target, **tiles), target, seed)
    parts = weight(rng, layout)
    for count in [rows] if static is not None else rows:
        arguments, x = activations(rng, count, layout, dtype)
        assert_close(run(compiled, arguments, parts, layout, dtype), x, parts, layout)
