"""The CUDA text that quantizes activations, run on the host, against the plain function on llvm."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
import tvm
from cuda_text import CudaText
from int8_runs import as_words, build, group_sums, quantized, run

from sits_tvm import parse_target
from sits_tvm.config import QuantSpec
from sits_tvm.device_code import compile_device_code, record_launches
from tir_schedules.activations.cpu import QuantizeActivation
from tir_schedules.activations.cuda import QuantizeActivationCuda
from tir_schedules.int4_format.activation_format import ActivationFormat, scale_columns
from tir_schedules.int4_format.packing import PackedLayout
from tir_schedules.matmul.int8_matmul import quantize_activation

TARGET = parse_target("cuda -arch=sm_90")
TIES = np.arange(-126.5, 127) / 127
"""Of a part whose largest magnitude is 1."""
EDGES = [[1.0], [2.0**-24], [2.0**-90], [2.0**-99.5], [2.0**-110], [2.0**100], [2.0**127.9]]


def layout_of(k, group_size, activation="int8", **spec):
    spec = QuantSpec(group_size=group_size, activation=activation, **spec)
    return PackedLayout(16, k, spec, "fragments")


def plain(layout, dtype, rows=(None, None)):
    form = ActivationFormat.of(layout)
    return quantize_activation(rows, layout.k, layout.group_size, dtype, form)


def compiled_both(layout, dtype):
    func = plain(layout, dtype)
    schedule = QuantizeActivationCuda().apply(func, TARGET, False)
    assert schedule is not None
    return CudaText(schedule.mod["main"], TARGET, outputs=3), build(func, None, "host")


def outputs_of(layout, axes):
    scales = layout.padded_k // scale_columns(layout.k, layout.group_size)
    return [
        ((*axes, ActivationFormat.of(layout).words(layout.padded_k)), "int32"),
        ((*axes, scales), "float32"),
        ((*axes, layout.groups), "int32"),
    ]


def on_host(text, x, layout):
    made = [np.full(shape, 77, dtype) for shape, dtype in outputs_of(layout, x.shape[:-1])]
    text(x, *made)
    return made


def assert_equal(both, x, layout):
    text, plain = both
    expected = run(plain, x, outputs=outputs_of(layout, x.shape[:-1]))
    for got, want in zip(on_host(text, x, layout), expected, strict=True):
        np.testing.assert_array_equal(got.view("uint32"), want.view("uint32"))


def activations(rng, axes, k, dtype):
    """Normal ones, whole rows of ties, zeros, and magnitudes from the smallest to the largest."""
    x = rng.standard_normal((*axes, k)) * 10 ** rng.uniform(-2, 2, (*axes, 1))
    rows = x.reshape(-1, k)
    with np.errstate(over="ignore"):
        for i, row in enumerate(rows[1:]):
            if i == 0:
                row[:] = 0
            elif i == 1:
                row[:] = rng.choice(TIES, k)
                row[::31] = 1
            else:
                row *= EDGES[i % len(EDGES)][0] / np.abs(row).max()
        largest = float(ml_dtypes.finfo(dtype).max)
        return np.clip(x, -largest, largest).astype(dtype)


SHAPES = [(4096, 128), (288, 32), (300, 32), (640, 64), (37, -1), (300, -1), (2304, -1)]
SLOW = [(72, 32), (5, 32), (128, -1), (640, 128), (130, 64), (1000, -1), (18432, -1)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("k", "group_size"), [*SHAPES, *(pytest.param(*s, marks=pytest.mark.slow) for s in SLOW)]
)
def test_bit_for_bit(rng, k, group_size, dtype):
    layout = layout_of(k, group_size)
    both = compiled_both(layout, dtype)
    for axes in [(0, 4), (1, 1), (3, 5)]:
        assert_equal(both, activations(rng, axes, k, dtype), layout)


INT4 = [(4096, 128), (288, 32), (96, 32), (37, -1), (72, -1)]
SLOW_INT4 = [(300, 32), (160, 32), (32, 32), (64, 64), (200, 64), (2304, -1), (8, -1), (18432, -1)]


@pytest.mark.parametrize("scale", ["absmax", "power-of-two"])
@pytest.mark.parametrize(
    ("k", "group_size"), [*INT4, *(pytest.param(*s, marks=pytest.mark.slow) for s in SLOW_INT4)]
)
def test_packed_codes_are_those_of_the_plain_function_and_of_llvm(rng, k, group_size, scale):
    """A part of 96 columns shares a unit with the next; rows that end inside one have zeros."""
    layout = layout_of(k, group_size, "int4", activation_scale=scale)
    both = compiled_both(layout, "float16")
    for axes in [(0, 4), (1, 1), (3, 5)]:
        assert_equal(both, activations(rng, axes, k, "float16"), layout)
    in_bytes = PackedLayout(16, k, layout.spec, "vectors")
    kernel = build(plain(in_bytes, "float16", 5), QuantizeActivation(), "host")
    x = activations(rng, (5,), k, "float16")
    words, *others = run(kernel, x, outputs=outputs_of(in_bytes, (5,)))
    codes = words.view("int8").reshape(5, -1, 2, 4).swapaxes(2, 3).reshape(5, -1)[:, :k]
    found = on_host(both[0], x[None], layout)
    np.testing.assert_array_equal(found[0][0], as_words(codes.astype("int64"), layout))
    for got, want in zip(found[1:], others, strict=True):
        np.testing.assert_array_equal(got[0].view("uint32"), want.view("uint32"))


FAULTS = {
    "nibbles": (r"& 252645135\)", "& 117901063)"),
    "upper half": (r"& 252645135\) << 4", "& 252645135) << 3"),
    "the other half": (r"\^ 4\)", "^ 2)"),
    "parts of a pair": (r"% 24\)", "% 12)"),
    "largest code": (r"0x1\.cp\+2f", "0x1.ep+2f"),
    "rounding": (r"0x1\.8p\+23f", "0x1.8p+22f"),
}


@pytest.fixture(scope="module")
def packed_case():
    layout = layout_of(288, 32, "int4")
    x = activations(np.random.default_rng(3), (3, 5), 288, "float16")
    return compiled_both(layout, "float16"), x, layout


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_packed_codes_are_seen(packed_case, fault):
    (text, kernel), x, layout = packed_case
    pattern, by = FAULTS[fault]
    assert re.search(pattern, text.text)
    assert_equal((text, kernel), x, layout)
    broken = text.edited(lambda source: re.sub(pattern, by, source))
    with pytest.raises(AssertionError, match="not equal"):
        assert_equal((broken, kernel), x, layout)


@pytest.mark.parametrize("activation", ["int8", "int4"])
@pytest.mark.parametrize("scale", ["absmax", "power-of-two"])
def test_codes_are_those_of_the_definition(rng, activation, scale):
    """In NumPy: -7…7 or -127…127, never beyond, whichever scale; both ends occur for absmax."""
    layout = layout_of(288, 32, activation, activation_scale=scale)
    x = activations(rng, (1, 24), 288, "float32")
    codes, steps = quantized(x[0], layout)
    found = on_host(compiled_both(layout, "float32")[0], x, layout)
    want = as_words(codes, layout), steps, group_sums(codes, layout).astype("int32")
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(got[0].view("uint32"), expected.view("uint32"))
    largest = 7 if activation == "int4" else 127
    if scale == "absmax":
        assert (codes.min(), codes.max()) == (-largest, largest)
    else:
        assert (np.frexp(steps)[0] == 0.5).all()
        assert (np.abs(codes).max(-1) * 2 > largest // 2).sum() >= 20


@pytest.mark.parametrize("largest", [7, 127])
def test_a_power_of_two_clips_nothing_and_is_no_larger_than_it_must_be(largest):
    """At amax = largest · 2^e, and at its two neighbours."""
    activation = "int4" if largest == 7 else "int8"
    layout = layout_of(64, 64, activation, activation_scale="power-of-two")
    x = np.zeros((1, 9, 64), "float32")
    for i, exponent in enumerate((-40, 0, 40)):
        edge = np.float32(largest * 2.0**exponent)
        x[0, 3 * i : 3 * i + 3, 5] = (
            np.nextafter(edge, np.float32(0)),
            edge,
            np.nextafter(edge, np.float32(np.inf)),
        )
    _, scale, _ = on_host(compiled_both(layout, "float32")[0], x, layout)
    expected = [2.0 ** (exponent + i // 2) for exponent in (-40, 0, 40) for i in range(3)]
    np.testing.assert_array_equal(scale.reshape(-1), np.array(expected, "float32"))


def next_to_ties(rng, exponent, bit, count, code):
    """Pairs (x, largest) whose quotient x / scale, from 2^bit on, is hardest to round: one near the
    middle between two float32, of which one is a tie of integers."""
    ties = np.arange(2 ** (bit + 1) + 1, min(2 ** (bit + 2), 2 * code - 1), 2) << 23 - bit
    middles = np.add.outer(ties, [-1, 1]).reshape(-1)  # times 2^(24 - bit)
    largest = rng.uniform(1, 2, (1 << 23) // len(middles)).astype("float32")
    largest *= np.float32(2.0**exponent)
    scale = np.maximum(largest, np.float32(2.0**-100)) / np.float32(code)
    mantissa, power = np.frexp(scale)
    products = np.multiply.outer((mantissa * 2**24).astype("int64"), middles)
    dropped = np.frexp(products.astype("float64"))[1] - 24
    x = np.rint(products * 2.0**-dropped).astype("int64")
    gaps = np.abs((x << dropped) - products)
    best = np.argpartition(gaps, count, axis=None)[:count]
    i, j = np.unravel_index(best, gaps.shape)
    x = np.ldexp(x[i, j].astype("float32"), dropped[i, j] + power[i] - 48 + bit)
    assert (np.abs(x / scale[i] * 2 % 2 - 1) < 1e-6 * 2**bit).all()
    return x, largest[i]


@pytest.mark.parametrize("activation", ["int8", "int4"])
@pytest.mark.parametrize("exponent", [0, -100, pytest.param(120, marks=pytest.mark.slow)])
def test_quotients_next_to_ties(rng, exponent, activation):
    layout = layout_of(64, 32, activation)
    both = compiled_both(layout, "float32")
    for bit in (0, 6) if activation == "int8" else (0, 2):
        code = 127 if activation == "int8" else 7
        x, largest = next_to_ties(rng, exponent, bit, 512, code)
        assert_equal(both, np.stack([x, largest] * 32, -1).reshape(64, 8, 64), layout)


def hardest_quotients(code):
    """All x and scale of 24 bits whose quotient is next to a middle between two float32, of which
    one is a tie of integers: away from it by at most 4 of 2^48 parts, that is, by what a step of
    Newton's gets wrong. (x, largest) with scale = largest / code."""
    found = []
    for tie in np.arange(0.5, code):
        bit = int(np.floor(np.log2(tie)))
        middles = {2 ** (24 - bit) * tie + side for side in (-1, 1)}
        for middle, rest in itertools.product(map(int, middles), (-4, -3, -2, -1, 1, 2, 3, 4)):
            for shift in (24, 25):  # x 2^shift = middle scale + rest
                scale = -rest * pow(middle, -1, 1 << shift) % (1 << shift)
                x = (middle * scale + rest) >> shift
                if min(scale, x) >= 1 << 23 and max(scale, x) < 1 << 24:
                    found.append((np.ldexp(x, shift + bit - 48), np.ldexp(scale, -24)))
    x, scale = np.array(found, "float32").T
    near = scale * np.float32(code) + np.spacing(scale * code) * np.arange(-1, 2)[:, None]
    of = near.astype("float32") / np.float32(code) == scale
    reached = of.any(0)
    return x[reached], near.astype("float32")[of.argmax(0), np.arange(len(x))][reached]


@pytest.mark.parametrize("activation", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_the_hardest_quotients(activation):
    """Where approximate reciprocals are off by one unit in the last place, as they may be."""
    x, largest = hardest_quotients(127 if activation == "int8" else 7)
    assert len(x) > (500 if activation == "int8" else 30)
    pairs = np.stack([x, largest] * 16, -1)
    pairs = np.concatenate([pairs, -pairs, np.ones_like(pairs[: len(x) % 2 * 2])])
    layout = layout_of(64, 32, activation)
    assert_equal(compiled_both(layout, "float32"), pairs.reshape(1, -1, 64), layout)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", ["absmax", "power-of-two"])
@pytest.mark.parametrize(("k", "group_size"), [(300, 32), (512, -1)])
def test_columns_that_are_not_finite_are_not_hidden(bad, k, group_size, scale):
    layout = layout_of(k, group_size, activation_scale=scale)
    x = np.ones((1, 2, k), "float32")
    x[0, 0, 40] = bad
    words, steps, sums = on_host(compiled_both(layout, "float32")[0], x, layout)
    assert not np.isfinite(steps[0, 0, 0])
    one = 2.0**-6 if scale == "power-of-two" else np.float32(1) / np.float32(127)
    assert (steps.reshape(-1)[1:] == one).all()
    codes = words.view("int8").astype("int32")
    padded = codes.reshape(*sums.shape, layout.group_size)
    np.testing.assert_array_equal(padded.sum(-1), sums)


def scheduled(arch, k, group_size=-1, dtype="float16", activation="int8"):
    func = plain(layout_of(k, group_size, activation), dtype, None)
    return QuantizeActivationCuda().apply(func, parse_target(f"cuda -arch={arch}"), False)


def test_leaves_others_alone():
    """GPUs without the instructions, and parts that no block holds."""
    assert scheduled("sm_75", 64) is None
    assert scheduled("sm_80", 65536) is not None
    assert scheduled("sm_80", 65544) is None


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("k", "group_size", "dtype", "activation", "loads", "stores"),
    [
        (4096, 128, "bfloat16", "int8", 1, 1),
        (4096, 128, "float16", "int4", 1, 1),
        (14336, -1, "float32", "int8", 14, 7),
        (65536, -1, "float16", "int8", 8, 8),
    ],
)
def test_machine_code(arch, k, group_size, dtype, activation, loads, stores):
    """128-bit loads alone, nothing spilled, and no division that is a call. Codes are written 64
    bits at a time; the other two stores are of a scale and a sum."""
    attributes = {"global_symbol": "main", "tirx.is_scheduled": True}
    func = scheduled(arch, k, group_size, dtype, activation).mod["main"].with_attrs(attributes)
    with record_launches() as launches:
        built = tvm.compile(tvm.IRModule({"main": func}), parse_target(f"cuda -arch={arch}"))
    (kernel,) = compile_device_code(built, arch, launches).kernels
    assert kernel.sass["LDG.128"] == loads
    assert (kernel.sass["STG.E.64"], kernel.sass["STG.E"]) == (stores, 2)
    assert kernel.sass["LDG.narrow"] == kernel.sass["CALL"] == kernel.spills == 0
