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
    symbolic_types,
)
from attention_runs import static_types
from gpu_emulator import Emulated

from sits_tvm import parse_target
from tir_schedules.attention.cuda import cuda_refusal

# (B, Sq, Sk): a block has 64 rows and tiles of 64 or 32 keys
SHAPES = [(1, 65, 130), (2, 9, 70), (2, 1, 129), (1, 9, 3), (0, 5, 5), (1, 0, 5), (2, 5, 0)]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def emulated(types, **attributes):
    return Emulated(kernel(types, **attributes), TARGET)


FLOAT = {"dtype": "float32"}
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
    "24 and 100": ({"width": 24, "value_width": 100, "heads": (2, 1)}, {"causal": 0}),
    "2 and 70": (
        {"width": 2, "value_width": 70, "heads": (1, 1), "dtype": "bfloat16"},
        {"window": 20, "empty_row": "zero"},
    ),
    "single": ({**FLOAT, "heads": (3, 1), "value_width": 48}, {"causal": "bottom_right"}),
    "single, 33 and 5": (
        {**FLOAT, "width": 33, "value_width": 5, "bias": ("b1qk", "float32")},
        {"softcap": 2.0, "empty_row": "uniform"},
    ),
    "single, 50 and 6": (
        {**FLOAT, "width": 50, "value_width": 6, "bias": BOOL},
        {"causal": -3, "window": 40, "empty_row": "zero"},
    ),
    "single, D = 256": (
        {**FLOAT, "width": 256, "heads": (2, 1), "bias": HALF},
        {"causal": 0, "window": 50},
    ),
}
SLOW = {"2 and 70", "single, 50 and 6", "single, D = 256", "144 and 208"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
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


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("level", [-200.0, 200.0])
def test_keeps_scores_far_from_zero_apart(level, dtype, rng):
    q, k, v = inputs(rng, (1, 40, 90), heads=(1, 1), width=16, dtype=dtype)
    q[...], k[..., 0], k[..., 1:] = 4.0, level, 0.0
    k[..., 1] = rng.standard_normal(k.shape[:3])
    compiled = emulated(static_types([q, k, v]), causal=0)
    assert_close(run(compiled, [q, k, v]), [q, k, v], causal=0)


@pytest.mark.parametrize(("dtype", "by"), [("float16", "bias"), ("float32", "causal")])
def test_hidden_keys_may_hold_anything(dtype, by, rng):
    arrays = inputs(rng, (1, 20, 50), heads=(2, 1), width=16, dtype=dtype)
    if by == "bias":
        arrays.append(np.where(np.tri(20, 50, dtype=bool), 0.5, -np.inf).astype("float32"))
    compiled = emulated(static_types(arrays), causal=0 if by == "causal" else None)
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
    ({"width": 33}, "sm_90", "D=33 is odd; rows of float16 are then not 4 bytes aligned"),
    ({"value_width": 272}, "sm_90", "Dv=272 is more than the 256 that fit in registers"),
    ({}, "sm_75", "sm_75 has no asynchronous copies"),
    (
        {"dtype": "float32", "width": 256},
        "sm_86",
        "needs 133120 bytes of shared memory, more than the 101376 of sm_86",
    ),
]


@pytest.mark.parametrize(("form", "arch", "reason"), REFUSED)
def test_says_why_there_is_no_kernel(form, arch, reason):
    spec = spec_of(symbolic_types(**form))
    assert reason in cuda_refusal(spec, parse_target(f"cuda -arch={arch}"))


def test_blocks_lie_along_x_which_holds_most():
    """Rows of 5 · 2²² and 2¹⁷ heads are each more than 65535 blocks, the limit along y and z."""
    long = Emulated(kernel([((1, 1, 5 << 22, 16), "float16")] * 3), TARGET)
    assert long.extents() == {"blockIdx.x": 5 << 16, "threadIdx.y": 4, "threadIdx.x": 32}
    wide = Emulated(kernel([((1 << 15, 4, 2, 16), "float16")] * 3), TARGET)
    assert wide.extents()["blockIdx.x"] == 1 << 17


def test_refuses_more_blocks_than_a_grid_has():
    spec = spec_of([((1 << 30, 2, 1, 16), "float16")] * 3)
    assert cuda_refusal(spec, TARGET) == (
        "needs 2147483648 blocks, more than the 2147483647 of a grid"
    )
