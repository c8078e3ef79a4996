"""The INT4 format against a reference written differently: scalar loops in float64."""

import itertools
import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sits_tvm import QuantSpec
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import PackedLayout, pack, quantize, unpack, unpack_parts

SHAPES = [(16, 128), (5, 300), (33, 72), (3, 17), (1, 1)]
SPECS = [
    QuantSpec(group_size=g, symmetric=s, scale_dtype=d)
    for g, s, d in itertools.product((32, 64, 128, -1), (True, False), ("float16", "float32"))
]
SPECS += [QuantSpec(bits=b, group_size=32, symmetric=s) for b in (2, 3) for s in (True, False)]


def reference(weight: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """The dequantized weight, element by element."""
    n, k = weight.shape
    group_size = k if spec.group_size == -1 else spec.group_size
    out = np.zeros((n, k))
    for row, start in itertools.product(range(n), range(0, k, group_size)):
        group = [float(value) for value in weight[row, start : start + group_size]]
        low, high = min(0.0, *group, 0.0), max(0.0, *group, 0.0)
        top = 2**spec.bits - 1
        span = max(-low, high) / (top // 2) if spec.symmetric else (high - low) / top
        scale = float(np.dtype(spec.scale_dtype).type(np.float32(span))) if span else 1.0
        scale = scale or float(np.finfo(spec.scale_dtype).smallest_subnormal)
        zero = (top + 1) // 2 if spec.symmetric else min(top, max(0, round(-low / scale)))
        for i, value in enumerate(group):
            ratio = float(np.float32(value) / np.float32(scale))
            out[row, start + i] = (min(top, max(0, round(ratio) + zero)) - zero) * scale
    return out


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_matches_scalar_reference(rng, spec, shape, order):
    weight = (rng.standard_normal(shape) * 0.02).astype("float32")
    layout = PackedLayout(*shape, spec, order)
    parts = pack(weight, spec, order)
    assert tuple(part.shape for part in parts) == layout.shapes
    assert tuple(str(part.dtype) for part in parts) == layout.dtypes
    assert sum(part.nbytes for part in parts) == layout.nbytes
    np.testing.assert_allclose(unpack(parts, layout), reference(weight, spec), rtol=1e-6)


def test_nibble_order_by_hand():
    """A symmetric row at scale 1: value v has code v + 8, eight per word, low nibble first."""
    weight = np.zeros((1, 32), "float32")
    weight[0, :17] = [-7, *range(-7, 8), 7]
    codes, scale = pack(weight, QuantSpec(group_size=32))
    assert scale[0, 0, 0] == 1
    assert [f"{word:08x}" for word in codes[0, :, 0]] == [
        "76543211",
        "fedcba98",
        "8888888f",
        "88888888",
    ]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group=st.sampled_from([32, 64, 128, -1]),
    symmetric=st.booleans(),
    activation=st.sampled_from([None, "int8"]),
    seed=st.integers(0, 1 << 30),
)
def test_every_order_holds_the_same_weight(n, k, group, symmetric, activation, seed):
    spec = QuantSpec(group_size=group, symmetric=symmetric, activation=activation)
    weight = np.random.default_rng(seed).standard_normal((n, k)).astype("float32")
    quantized = quantize(weight, spec)
    for order in ORDERS:
        layout, parts = PackedLayout(n, k, spec, order), pack(weight, spec, order)
        assert tuple(part.shape for part in parts) == layout.shapes
        for got, expected in zip(unpack_parts(parts, layout), quantized, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_weight_of_many_chunks_is_put_together():
    """2^20 elements are packed at a time: chunks of 16 rows here."""
    spec = QuantSpec(group_size=32, symmetric=False)
    weight = np.random.default_rng(2).standard_normal((50, 40000)).astype("float32")
    for order in ORDERS:
        restored = unpack_parts(pack(weight, spec, order), PackedLayout(50, 40000, spec, order))
        for got, expected in zip(restored, quantize(weight, spec), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_lanes_interleave_output_channels():
    spec = QuantSpec(group_size=32)
    weight = np.random.default_rng(1).standard_normal((32, 64)).astype("float32")
    plain, vectors = pack(weight, spec, "rows"), pack(weight, spec, "vectors")
    for one, many in zip(plain, vectors, strict=True):
        for row, column in itertools.product(range(32), range(one.shape[1])):
            assert many[row // 16, column, row % 16] == one[row, column, 0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_largest_weight_is_not_clipped(rng, symmetric):
    """amax / 7 keeps the extreme within half a step, so that its gradient survives."""
    weight = rng.standard_normal((64, 128)).astype("float32")
    spec = QuantSpec(group_size=32, symmetric=symmetric)
    layout = PackedLayout(64, 128, spec)
    parts = pack(weight, spec)
    step = np.repeat(parts[1][:, :, 0].astype("float32"), 32, axis=1)
    assert (np.abs(unpack(parts, layout) - weight) <= 0.51 * step).all()


def test_zero_group_has_positive_scale():
    parts = pack(np.zeros((2, 64), "float32"), QuantSpec(group_size=32))
    assert (parts[1] == 1).all()
    assert not unpack(parts, PackedLayout(2, 64, QuantSpec(group_size=32))).any()


def test_tiny_weights_do_not_divide_by_zero():
    """A float16 scale would underflow to 0."""
    codes, scale = pack(np.full((1, 32), 1e-12, "float32"), QuantSpec(group_size=32))
    assert (scale > 0).all()
    assert (codes == 0x88888888).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_what_is_not_finite(bad):
    weight = np.zeros((4, 64), "float32")
    weight[2, 40] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        pack(weight, QuantSpec())


def test_refuses_scale_overflow():
    weight = np.full((1, 32), 1e6, "float32")
    with pytest.raises(ValueError, match=r'scale overflows float16.*scale_dtype="float32"'):
        pack(weight, QuantSpec(group_size=32))
    pack(weight, QuantSpec(group_size=32, scale_dtype="float32"))


@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_beats_absmax(rng, symmetric):
    weight = rng.standard_t(3, (64, 256)).astype("float32")
    errors = []
    for method in ("absmax", "mse"):
        spec = QuantSpec(group_size=64, symmetric=symmetric, scale_method=method)
        restored = unpack(pack(weight, spec), PackedLayout(64, 256, spec))
        errors.append(np.square(restored - weight).reshape(64, 4, 64).sum(-1))
    assert (errors[1] <= errors[0]).all()
    assert errors[1].sum() < 0.95 * errors[0].sum()


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_half_precision_weights(rng, dtype):
    weight = rng.standard_normal((8, 64)).astype(dtype)
    for half, full in zip(
        pack(weight, QuantSpec()), pack(weight.astype("float32"), QuantSpec()), strict=True
    ):
        np.testing.assert_array_equal(half, full)


def test_short_last_group_ignores_padding():
    """The scale of a short group spans its own elements only."""
    weight = np.ones((1, 40), "float32")
    weight[0, 32:] = 0.5
    _, scale, _ = quantize(weight, QuantSpec(group_size=32))
    np.testing.assert_array_equal(scale, np.float16([[1 / 7, 0.5 / 7]]))


@pytest.mark.parametrize("order", ORDERS)
def test_memory_stays_below_twice_the_weight(order):
    """The parts and what it takes to make them, beside a layer of 14336 x 4096."""
    weight = np.ones((14336, 4096), "float16")
    tracemalloc.start()
    parts = pack(weight, QuantSpec(group_size=32, symmetric=False), order)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(part.nbytes for part in parts) < peak < weight.nbytes
