"""Faults of other INT4 kernels, as small inputs that show each of them: the CUDA text on the host.

From public reports: tails of K (vllm 9913), nibble order (imp 722), signs of nibbles (tilelang 2477
and 2482), the group index (vllm 9212, torch-xpu-ops 5001), the accumulator (vllm 33972, openvino
34704), W4A8 that silently ran as W4A16 (vllm 38066), rows beyond a tile (optimum-quanto 315).
"""

import numpy as np
import pytest
from cuda_text import CudaText
from int8_runs import as_words, group_sums, quantized, random_weight
from matmul_cuda_runs import TARGET, layout_of, plain, scheduled

from tir_schedules.int4_format.packing import assemble, unpack

KINDS = [None, "int8"]
SLOW = pytest.mark.slow


def kernel(layout, rows, dtype="float16"):
    """``y = kernel(x, parts)`` of float X."""
    compiled = CudaText(scheduled(plain(layout, rows, dtype)), TARGET)

    def run(x, parts):
        arguments, out_dtype = [x.astype(dtype)], dtype
        if layout.spec.activation == "int8":
            codes, scale = quantized(x.astype("float32"), layout)
            sums = group_sums(codes, layout).astype("int32")
            arguments, out_dtype = [as_words(codes, layout), scale, sums], "float32"
        out = np.full((len(x), layout.n), np.nan, out_dtype)
        compiled(*arguments, *parts, out)
        return out

    return run


def packed(codes, layout, scale=1.0, zeros=None):
    """The parts of a weight of these codes (n, k), with one scale, and zero points (n, groups)."""
    padding = (0, 0), (0, layout.padded_k - layout.k)
    filled = np.pad(codes, padding, constant_values=layout.padding_code).astype("uint8")
    scales = np.full((layout.n, layout.groups), scale, layout.spec.scale_dtype)
    return list(assemble(layout, lambda rows: (
        filled[rows], scales[rows], None if zeros is None else zeros[rows]
    )))  # fmt: skip


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(("k", "group_size"), [(4304, 32), (10944, 128)])
def test_the_last_column_counts(k, group_size, rows, activation, rng):
    layout = layout_of(16, k, activation, group_size=group_size)
    parts = random_weight(rng, layout)
    x = np.zeros((rows, k))
    x[-1, -1] = 1
    y = kernel(layout, rows)(x, parts)
    expected = unpack(tuple(parts), layout)[:, -1].astype(y.dtype)
    np.testing.assert_allclose(y[-1], expected, rtol=2e-7)
    assert not y[:-1].any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("activation", "dtype"), [(None, "float16"), (None, "bfloat16"), ("int8", "float16")]
)
def test_every_code_is_itself(activation, dtype, symmetric):
    """Channel n has code (k + 3 n) % 16 in column k, and zero point n % 16: a row a column."""
    layout = layout_of(32, 64, activation, group_size=32, symmetric=symmetric)
    n, k = np.indices((32, 64))
    codes, zeros = (k + 3 * n) % 16, None if symmetric else np.tile(n[:, :1] % 16, 2)
    parts = packed(codes, layout, zeros=None if zeros is None else zeros.astype("uint8"))
    y = kernel(layout, 64, dtype)(np.eye(64), parts)
    expected = codes - (8 if zeros is None else zeros[:, :1])
    if activation is None:
        assert (y == expected.T).all()
    np.testing.assert_allclose(y.astype("float32"), expected.T, rtol=1e-6)


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("k", [384, 16512, *(pytest.param(k, marks=SLOW) for k in (128, 256))])
def test_every_group_has_its_own_scale(k, rows, activation):
    """The scale of group j is 2^-(j mod 8) and all weights are one step: sums in closed form."""
    layout = layout_of(16, k, activation, group_size=128)
    scales = np.exp2(-(np.arange(layout.groups) % 8))
    parts = packed(np.full((16, k), 9), layout)
    parts[1][:] = scales[None, :, None]
    y = kernel(layout, rows)(np.ones((rows, k)), parts)
    np.testing.assert_allclose(y, np.full((rows, 16), 128 * scales.sum()), rtol=2e-4)


@pytest.mark.parametrize("rows", [1, 40])
def test_sums_beyond_float16_do_not_overflow(rows):
    """4096 products of 200 and 7 are 5.7 million; scaled by 2^-8 they fit float16 again."""
    layout = layout_of(16, 4096, group_size=128)
    y = kernel(layout, rows)(
        np.full((rows, 4096), 200.0), packed(np.full((16, 4096), 15), layout, 2.0**-8)
    )
    np.testing.assert_array_equal(y, np.full((rows, 16), 22400, "float16"))


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_largest_integers_are_exact(symmetric):
    """Codes and activations of the largest magnitude, over a long channel that is one group."""
    layout = layout_of(16, 28672, "int8", group_size=-1, symmetric=symmetric)
    zeros = None if symmetric else np.zeros((16, 1), "uint8")
    parts = packed(np.full((16, 28672), 0 if symmetric else 15), layout, zeros=zeros)
    y = kernel(layout, 2)(np.full((2, 28672), 127.0), parts)
    np.testing.assert_allclose(y, 28672 * 127 * (-8.0 if symmetric else 15.0), rtol=2e-7)


@pytest.mark.parametrize("rows", [1, 40])
def test_w4a8_runs_on_integers(rows):
    """Beside 1000, an activation of 3 is less than half a step of int8, so that it counts as 0."""
    float_, int8 = (layout_of(16, 64, activation, group_size=64) for activation in KINDS)
    x = np.full((rows, 64), 3.0)
    x[:, 0] = 1000
    codes = np.full((16, 64), 9)
    np.testing.assert_allclose(kernel(float_, rows)(x, packed(codes, float_)), 1189, rtol=1e-3)
    np.testing.assert_allclose(kernel(int8, rows)(x, packed(codes, int8)), 1000, rtol=1e-6)


@pytest.mark.parametrize("activation", KINDS)
def test_what_is_not_finite_stays_in_its_row(activation, rng):
    layout = layout_of(16, 128, activation, group_size=64)
    parts, x = random_weight(rng, layout), rng.standard_normal((20, 128))
    clean = kernel(layout, 20)
    before = clean(x, parts)
    x[3, 5] = np.inf if activation is None else 0
    after = clean(x, parts)
    others = np.arange(20) != 3
    np.testing.assert_array_equal(before[others], after[others])
    assert activation is not None or not np.isfinite(after[3]).any()
