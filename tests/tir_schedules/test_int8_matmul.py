"""INT8 activations times INT4 weights against exact integer sums, unscheduled and scheduled."""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_runs import (
    as_words,
    build,
    group_sums,
    product,
    quantized,
    random_weight,
    run,
    run_product,
    scales,
)
from kernel_runs import ROWS, TARGETS, target

from sits_tvm.config import QuantSpec
from tir_schedules.activations.cpu import QuantizeActivation
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import PackedLayout
from tir_schedules.matmul.int8_matmul import int8_matmul, quantize_activation
from tir_schedules.matmul_cpu.rule import Matmul

TARGETS |= {
    "skylake": "llvm -mcpu=skylake-avx512",
    "alderlake": "llvm -mcpu=alderlake",
    "cascadelake": "llvm -mcpu=cascadelake",
    "znver4": "llvm -mcpu=znver4",
    "neoverse": "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1",
    "aarch64": "llvm -mtriple=aarch64-linux-gnu",
}
RUNS_HERE = ("host", "haswell", "generic")
G32 = QuantSpec(group_size=32, symmetric=False, scale_dtype="float32")
SHAPES = [
    (40, 72, G32),
    (16, 640, QuantSpec(group_size=128)),
    (50, 37, QuantSpec(group_size=-1, symmetric=False)),
    (70, 16, QuantSpec(group_size=32)),
]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def assert_rounded(y, expected, bound):
    """float32 sums of exact terms, at most a rounding for each group and a few more."""
    step = np.finfo(y.dtype).eps * np.abs(expected)
    assert (np.abs(y - expected) <= 1e-6 * bound + step).all()


@pytest.mark.parametrize("rule", [None, Matmul()], ids=["plain", "scheduled"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("n", "k", "spec"), SHAPES)
def test_product(rng, n, k, spec, dtype, rule):
    layout = PackedLayout(n, k, spec, "vectors")
    parts = random_weight(rng, layout)
    kernel = build(int8_matmul(None, layout, dtype), rule, "host")
    for m in ROWS:
        codes, scale = quantized(rng.standard_normal((m, k)).astype("float32"), layout)
        y = run_product(kernel, codes, scale, parts, layout, dtype)
        assert_rounded(y, *product(codes, scale, parts, layout))


@pytest.mark.parametrize("activation", ["int8", "int4"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "k", "spec"), SHAPES)
def test_product_in_every_order(rng, n, k, spec, order, activation):
    """Those of 4 bits are packed in the order "fragments"."""
    layout = PackedLayout(n, k, replace(spec, activation=activation), order)
    parts = random_weight(rng, layout)
    kernel = build(int8_matmul(None, layout, "float32"), None, "host")
    codes, scale = quantized(rng.standard_normal((3, k)).astype("float32"), layout)
    y = run_product(kernel, codes, scale, parts, layout)
    assert_rounded(y, *product(codes, scale, parts, layout))


@pytest.mark.parametrize("name", RUNS_HERE)
def test_every_instruction_agrees(rng, name):
    layout = PackedLayout(40, 72, G32, "vectors")
    parts = random_weight(rng, layout)
    kernel = build(int8_matmul(None, layout, "float32"), Matmul(), name)
    for m in (1, 3, 40):
        codes, scale = rng.integers(-127, 128, (m, 72)), np.ones((m, scales(layout)), "float32")
        y = run_product(kernel, codes, scale, parts, layout)
        assert_rounded(y, *product(codes, scale, parts, layout))


@pytest.mark.parametrize(
    ("name", "instruction", "absent"),
    [
        ("znver4", "vpdpbusd", "vpmaddubsw"),
        ("cascadelake", "vpdpbusd", "vpmaddubsw"),
        ("alderlake", "vpdpbusd", "zmm"),
        ("skylake", "vpmaddubsw", "vpdpbusd"),
        ("haswell", "vpmaddubsw", "zmm"),
        ("generic", "paddd", "vp"),
        ("neoverse", "sdot", "zmm"),
        ("aarch64", "mla", "sdot"),
    ],
)
def test_instructions_are_those_of_the_target(name, instruction, absent):
    layout = PackedLayout(32, 64, G32, "vectors")
    scheduled = Matmul().apply(int8_matmul(None, layout, "float32"), target(name), False)
    assembly = tvm.compile(scheduled.mod, target=target(name)).mod.inspect_source("asm")
    assert instruction in assembly
    assert absent not in assembly


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_extremes_do_not_saturate(rows):
    """The largest sum: codes 15 and activations 127 throughout, over a whole channel."""
    layout = PackedLayout(16, 28672, QuantSpec(group_size=-1, scale_dtype="float32"), "vectors")
    parts = [np.full(layout.shapes[0], 0xFFFFFFFF, "uint32"), np.ones(layout.shapes[1], "float32")]
    kernel = build(int8_matmul(rows, layout, "float32"), Matmul(), "host")
    for sign in (1, -1):
        codes = np.full((rows, layout.k), 127 * sign)
        y = run_product(kernel, codes, np.ones((rows, scales(layout)), "float32"), parts, layout)
        assert (y == sign * 7 * 127 * 28672).all()


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("name", RUNS_HERE)
def test_every_code_meets_its_activation(rows, name):
    """One-hot rows read single weights of a ramp: no element is moved, no nibble confused."""
    layout = PackedLayout(32, 64, QuantSpec(group_size=32), "vectors")
    code = (np.arange(64)[None, :] + 3 * np.arange(32)[:, None]) % 16
    words = (code.reshape(32, 8, 8).astype("uint32") << (4 * np.arange(8, dtype="uint32"))).sum(-1)
    parts = [
        np.ascontiguousarray(words.reshape(2, 16, 8).swapaxes(1, 2)).astype("uint32"),
        np.ones(layout.shapes[1], "float16"),
    ]
    kernel = build(int8_matmul(rows, layout, "float32"), Matmul(), name)
    for start in range(0, 64, rows):
        eye = np.eye(64, dtype="int64")[start : start + rows] * -3
        x = np.concatenate([eye, np.zeros((rows - len(eye), 64), "int64")])
        y = run_product(kernel, x, np.ones((rows, scales(layout)), "float32"), parts, layout)
        np.testing.assert_array_equal(y[: len(eye)], -3 * (code - 8).T[start : start + rows])


@settings(max_examples=15, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group=st.sampled_from([32, 64, 128, -1]),
    symmetric=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape(m, n, k, group, symmetric, seed):
    layout = PackedLayout(n, k, QuantSpec(group_size=group, symmetric=symmetric), "vectors")
    rng = np.random.default_rng(seed)
    parts = random_weight(rng, layout)
    kernel = build(int8_matmul(m, layout, "float32"), Matmul(), "host")
    codes, scale = quantized(rng.standard_normal((m, k)).astype("float32"), layout)
    y = run_product(kernel, codes, scale, parts, layout)
    assert_rounded(y, *product(codes, scale, parts, layout))


@pytest.mark.parametrize("rule", [None, QuantizeActivation()], ids=["plain", "scheduled"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("k", "group"),
    [(72, 32), (37, -1), (5, 32), (128, -1), (640, 128), (640, 32), (300, 32)],
)
def test_quantize_activation(rng, k, group, dtype, rule):
    layout = PackedLayout(16, k, QuantSpec(group_size=group), "vectors")
    kernel = build(quantize_activation((None, None), k, layout.group_size, dtype), rule, "host")
    for axes in [(1, 1), (2, 3), (0, 4)]:
        x = rng.standard_normal((*axes, k)) * 10 ** rng.uniform(-2, 2, (*axes, 1))
        x = x.astype(dtype)
        if x.size:
            x[0, 0, :] = 0 if axes == (2, 3) else x[0, 0, :]
        flat = x.reshape(-1, k).astype("float32")
        codes, scale = quantized(flat, layout)
        outputs = [
            ((*axes, layout.padded_k // 4), "int32"),
            ((*axes, scales(layout)), "float32"),
            ((*axes, layout.groups), "int32"),
        ]
        words, steps, sums = run(kernel, x, outputs=outputs)
        np.testing.assert_array_equal(steps.reshape(-1), scale.reshape(-1))
        np.testing.assert_array_equal(words.reshape(-1), as_words(codes, layout).reshape(-1))
        np.testing.assert_array_equal(sums.reshape(-1), group_sums(codes, layout).reshape(-1))


@pytest.mark.parametrize("rule", [None, QuantizeActivation()], ids=["plain", "scheduled"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_columns_that_are_not_finite_are_not_hidden(bad, rule):
    """Of 10 groups of 32 columns two share a scale."""
    x = np.ones((2, 300), "float32")
    x[0, 40] = bad
    kernel = build(quantize_activation(2, 300, 32, "float32"), rule, "host")
    outputs = [((2, 80), "int32"), ((2, 5), "float32"), ((2, 10), "int32")]
    _, scale, _ = run(kernel, x, outputs=outputs)
    assert not np.isfinite(scale[0, 0])
    assert (scale.reshape(-1)[1:] == np.float32(1) / np.float32(127)).all()
