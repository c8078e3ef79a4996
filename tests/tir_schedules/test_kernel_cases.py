"""Faults of other INT4 kernels, as small inputs that show each of them: W4A16 and W4A8 on llvm.

From public reports: tails of K (vllm 9913), the group index (vllm 9212, torch-xpu-ops 5001), the
accumulator (vllm 33972, openvino 34704), W4A8 that silently ran as W4A16 (vllm 38066).
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_runs import build, random_weight, run, scales
from kernel_runs import assert_close, compile_kernel

from sits_tvm.config import QuantSpec
from tir_schedules.activations.cpu import QuantizeActivation
from tir_schedules.int4_format.packing import PackedLayout, unpack
from tir_schedules.matmul.int4_matmul import int4_matmul
from tir_schedules.matmul.int8_matmul import int8_matmul, quantize_activation
from tir_schedules.matmul_cpu.rule import Matmul

ORDER = "vectors"


def w4a16(layout, rows, dtype="float32"):
    kernel = compile_kernel(int4_matmul(rows, layout.n, layout.k, layout.spec, dtype, layout.order))
    return lambda x, parts: kernel(x, *parts, shape=(rows, layout.n), dtype=dtype)


def w4a8(layout, rows, dtype="float32"):
    quantize = build(
        quantize_activation(rows, layout.k, layout.group_size, dtype), QuantizeActivation(), "host"
    )
    product = build(int8_matmul(rows, layout, dtype), Matmul(), "host")

    def both(x, parts):
        shapes = [(rows, width) for width in (layout.padded_k // 4, scales(layout), layout.groups)]
        outputs = list(zip(shapes, ("int32", "float32", "int32"), strict=True))
        codes = run(quantize, x, outputs=outputs)
        return run(product, *codes, *parts, outputs=[((rows, layout.n), dtype)])[0]

    return both


@pytest.mark.parametrize("family", [w4a16, w4a8])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("k", "group_size"), [(4304, 32), (10944, 128)])
def test_the_last_column_counts(k, group_size, rows, family):
    layout = PackedLayout(64, k, QuantSpec(group_size=group_size), ORDER)
    parts = random_weight(np.random.default_rng(0), layout)
    x = np.zeros((rows, k), "float32")
    x[-1, -1] = 1
    y = family(layout, rows)(x, parts)
    np.testing.assert_allclose(y[-1], unpack(tuple(parts), layout)[:, -1], rtol=2e-7)
    assert not y[:-1].any()


@pytest.mark.parametrize("family", [w4a16, w4a8])
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("k", [128, 256, 384, 16512, 28672])
def test_every_group_has_its_own_scale(k, rows, family):
    """The scale of group j is 2^-(j mod 8) and all weights are one step: sums in closed form."""
    layout = PackedLayout(16, k, QuantSpec(group_size=128), ORDER)
    scales = np.exp2(-(np.arange(layout.groups) % 8))
    codes = np.full(layout.shapes[0], 0x99999999, "uint32")
    scale = np.broadcast_to(scales[None, :, None], layout.shapes[1]).astype("float16")
    y = family(layout, rows)(np.ones((rows, k), "float32"), [codes, np.ascontiguousarray(scale)])
    np.testing.assert_allclose(y, np.full((rows, 16), 128 * scales.sum()), rtol=1e-6)


@pytest.mark.parametrize("family", [w4a16, w4a8])
@pytest.mark.parametrize("rows", [1, 40])
def test_sums_beyond_float16_do_not_overflow(rows, family):
    """4096 products of 200 and 7 are 5.7 million; scaled by 2^-8 they fit float16 again."""
    layout = PackedLayout(16, 4096, QuantSpec(group_size=128), ORDER)
    codes = np.full(layout.shapes[0], 0xFFFFFFFF, "uint32")
    scale = np.full(layout.shapes[1], 2.0**-8, "float16")
    x = np.full((rows, 4096), 200, "float16")
    y = family(layout, rows, "float16")(x, [codes, scale])
    np.testing.assert_array_equal(y, np.full((rows, 16), 22400, "float16"))


@pytest.mark.parametrize("rows", [1, 40])
def test_w4a8_runs_on_integers(rows):
    """Beside 1000, an activation of 3 is less than half a step of int8, so that it counts as 0."""
    layout = PackedLayout(16, 32, QuantSpec(group_size=32), ORDER)
    parts = [np.full(layout.shapes[0], 0x99999999, "uint32"), np.ones(layout.shapes[1], "float16")]
    x = np.full((rows, 32), 3, "float32")
    x[:, 0] = 1000
    np.testing.assert_allclose(w4a16(layout, rows)(x, parts), 1000 + 31 * 3, rtol=1e-6)
    np.testing.assert_allclose(w4a8(layout, rows)(x, parts), 1000, rtol=1e-6)


@pytest.mark.parametrize("family", [w4a16, w4a8])
@pytest.mark.parametrize("n", [2048, 1000])
def test_one_row_reads_every_channel(n, family):
    """More channels than a core reads at once, so that each stream takes several steps."""
    layout = PackedLayout(n, 32, QuantSpec(group_size=32), ORDER)
    parts = random_weight(np.random.default_rng(0), layout)
    x = np.zeros((1, 32), "float32")
    x[0, 5] = 1
    y = family(layout, 1)(x, parts)
    np.testing.assert_allclose(y[0], unpack(tuple(parts), layout)[:, 5], rtol=2e-7)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group_size=st.sampled_from([32, 64, 128, -1]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(["float32", "float16"]),
    seed=st.integers(0, 1 << 30),
)
def test_w4a16_of_any_shape(rows, n, k, group_size, symmetric, dtype, seed):
    layout = PackedLayout(n, k, QuantSpec(group_size=group_size, symmetric=symmetric), ORDER)
    rng = np.random.default_rng(seed)
    parts = random_weight(rng, layout)
    x = rng.standard_normal((rows, k)).astype(dtype)
    weight = unpack(tuple(parts), layout).T
    y = w4a16(layout, rows, dtype)(x, parts)
    assert_close(y, x.astype("float64") @ weight.astype("float64"), x, weight)
