"""The CUDA attention kernel, lowered for sm_90 and run by an emulator, against float64."""

import numpy as np
import pytest
from attention_cuda_runs import (
    TARGET,
    assert_close,
    inputs,
    kernel,
    run,
    spec_of,
    static_types,
    symbolic_types,
)
from gpu_emulator import Emulated

from sits_tvm import parse_target
from tir_schedules.attention_cuda import cuda_attention

# (B, Sq, Sk): a block has 64 rows and tiles of 64 or 32 keys
SHAPES = [(1, 65, 130), (2, 9, 70), (2, 1, 129), (1, 9, 3), (0, 5, 5), (1, 0, 5), (2, 5, 0)]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def emulated(types, **attributes):
    return Emulated(kernel(types, **attributes), TARGET)


BOOL, HALF, SINGLE = ("bhqk", "bool"), ("qk", "float16"), ("1h1k", "float32")
CASES = {
    "plain": ({}, {}),
    "causal": ({"heads": (3, 1), "width": 16, "value_width": 32}, {"causal": 0}),
    "last with last": ({"heads": (14, 2), "dtype": "bfloat16"}, {"causal": "bottom_right"}),
    "offset, window": ({}, {"causal": -3, "window": 20, "empty_row": "zero"}),
    "window alone": ({}, {"window": 17, "empty_row": "uniform", "scale": -0.3}),
    "softcap": ({}, {"causal": 5, "window": 40, "softcap": 2.0, "empty_row": "uniform"}),
    "bool bias": ({"bias": BOOL}, {"empty_row": "zero"}),
    "half bias": (
        {"bias": HALF, "dtype": "bfloat16"},
        {"causal": "bottom_right", "softcap": 3.0, "empty_row": "uniform"},
    ),
    "bias of keys": ({"bias": SINGLE, "heads": (4, 4)}, {"window": 70}),
    "D = 80": ({"width": 80, "bias": ("b11k", "bool")}, {"causal": 0, "empty_row": "uniform"}),
    "D = 256": ({"width": 256, "heads": (2, 1), "dtype": "bfloat16"}, {"causal": 0, "window": 50}),
    "144 and 208": ({"width": 144, "value_width": 208, "heads": (1, 1)}, {"causal": 30}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64_at_symbolic_shapes(name, rng):
    form, attributes = CASES[name]
    compiled = emulated(symbolic_types(**form), **attributes)
    for shape in SHAPES:
        arrays = inputs(rng, shape, **form)
        assert_close(run(compiled, arrays), arrays, **attributes)


def test_equals_float64_at_constant_shapes(rng):
    arrays = inputs(rng, (1, 1, 300), heads=(8, 1), width=64)
    assert_close(run(emulated(static_types(arrays)), arrays), arrays)


def test_visits_no_tile_that_is_hidden(rng):
    arrays = inputs(rng, (1, 128, 512), heads=(1, 1), width=16)
    compiled = emulated(static_types(arrays), causal=64, window=100)
    assert_close(run(compiled, arrays), arrays, causal=64, window=100)
    # rows 64 to 127 see keys 29 to 191, rows 0 to 63 keys up to 127
    assert compiled.trips == [3, 2]


@pytest.mark.parametrize("level", [-200.0, 200.0])
def test_keeps_scores_far_from_zero_apart(level, rng):
    q, k, v = inputs(rng, (1, 40, 90), heads=(1, 1), width=16)
    q[...], k[..., 0], k[..., 1:] = 4.0, level, 0.0
    k[..., 1] = rng.standard_normal(k.shape[:3])
    compiled = emulated(static_types([q, k, v]), causal=0)
    assert_close(run(compiled, [q, k, v]), [q, k, v], causal=0)


def test_hidden_keys_may_hold_anything(rng):
    arrays = inputs(rng, (1, 20, 50), heads=(2, 1), width=16)
    compiled = emulated(static_types(arrays), causal=0)
    expected = run(compiled, arrays)
    arrays[1][:, :, 20:35], arrays[1][:, :, 35:] = np.nan, np.inf
    np.testing.assert_array_equal(run(compiled, arrays), expected)


def test_visible_nan_stays(rng):
    arrays = inputs(rng, (1, 20, 50), heads=(1, 1), width=16)
    arrays[1][:, :, 10] = np.nan
    out = run(emulated(static_types(arrays), causal=0, empty_row="zero"), arrays)
    assert np.isnan(out[:, :, 10:]).all()
    assert not np.isnan(out[:, :, :10]).any()


def test_a_row_of_lowest_scores_is_uniform(rng):
    """As an additive mask of the lowest number gives: hidden keys count only in such rows."""
    arrays = inputs(rng, (1, 70, 100), heads=(1, 1), width=16)
    bias = np.zeros((70, 100), "float32")
    bias[3], bias[:, 50:] = np.finfo("float32").min, np.finfo("float32").min
    compiled = emulated(static_types([*arrays, bias]), causal=0, empty_row="uniform")
    out = run(compiled, [*arrays, bias])
    assert_close(out, [*arrays, bias], causal=0, empty_row="uniform")
    np.testing.assert_allclose(out[0, 0, 3], arrays[2][0, 0].astype("float64").mean(0), atol=1e-3)


REFUSED = [
    ({"dtype": "float32"}, "sm_90", "q, k and v are float32"),
    ({"width": 24}, "sm_90", "D=24 is no multiple of 16 up to 256"),
    ({"value_width": 272}, "sm_90", "Dv=272 is no multiple of 16 up to 256"),
    ({}, "sm_75", "sm_75 has no mma of 16 x 8 x 16"),
]


@pytest.mark.parametrize(("form", "arch", "reason"), REFUSED)
def test_says_why_there_is_no_kernel(form, arch, reason):
    spec = spec_of(symbolic_types(**form))
    assert reason in cuda_attention(spec, parse_target(f"cuda -arch={arch}"))
