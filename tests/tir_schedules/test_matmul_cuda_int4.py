"""Products of INT4 activations: the CUDA text run on the host against float64, and machine code.

sm_80 multiplies INT4, sm_90 the same codes as INT8.
"""

from functools import cache

import numpy as np
import pytest
from cuda_text import CudaText
from int8_runs import as_words
from matmul_cuda_machine_code import machine_code
from matmul_cuda_runs import (
    activations,
    assert_close,
    check,
    layout_of,
    plain,
    run,
    scheduled,
    weight,
)
from test_matmul_cuda_faults import edited

from sits_tvm import parse_target
from sits_tvm.device_code.sass_pipes import multiply_adds
from tir_schedules.int4_format.packing import unpack
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul, _recognise
from tir_schedules.matmul_cuda.spaces import tile_fault
from tir_schedules.matmul_cuda.tile import Tile

TARGETS = {
    arch: parse_target(f"cuda -arch={arch}") for arch in ("sm_80", "sm_89", "sm_90", "sm_90a")
}
ROWS = (0, 1, 7, 16, 33, 100)
QUICK = {("sm_80", 32, False)}
SLOW = pytest.mark.slow
ONE_BUCKET = [
    pytest.param("sm_80", -1, False, 1, marks=SLOW),
    ("sm_90", 32, False, 7),
    ("sm_90", -1, False, 16),
    pytest.param("sm_80", 64, True, 9, marks=SLOW),
]


def formats():
    for arch in ("sm_80", "sm_90"):
        for group_size in (32, 64, 128, -1):
            for symmetric in (True, False):
                form = arch, group_size, symmetric
                yield pytest.param(*form, marks=() if form in QUICK else SLOW)


@pytest.mark.parametrize(("arch", "group_size", "symmetric"), formats())
def test_one_function_serves_every_number_of_rows(arch, group_size, symmetric):
    """Channels and columns that fill no tile, no unit and no group."""
    layout = layout_of(72, 330, "int4", group_size=group_size, symmetric=symmetric)
    check(layout, ROWS, target=TARGETS[arch])


@pytest.mark.parametrize(("arch", "group_size", "symmetric", "rows"), ONE_BUCKET)
def test_a_number_of_rows(arch, group_size, symmetric, rows):
    layout = layout_of(40, 200, "int4", group_size=group_size, symmetric=symmetric)
    check(layout, rows, target=TARGETS[arch])


@pytest.mark.parametrize("symmetric", [pytest.param(True, marks=SLOW), False])
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=SLOW), "sm_90"])
def test_largest_sums_are_exact(arch, symmetric):
    """Codes 15 or -8 and activations ±7 throughout, over a group and over a long channel."""
    for group_size, k in ((128, 256), (-1, 16384)):
        layout = layout_of(16, k, "int4", group_size=group_size, symmetric=symmetric)
        parts = [np.zeros(s, d) for s, d in zip(layout.shapes, layout.dtypes, strict=True)]
        parts[1][:] = 1
        if not symmetric:
            parts[0][:] = 0xFFFFFFFF
        compiled = CudaText(scheduled(plain(layout, 2), TARGETS[arch]), TARGETS[arch])
        signs = np.array([[7], [-7]])
        words = np.repeat(np.array([[0x77777777], [-0x66666667]], "int32"), layout.k // 8, 1)
        columns = k // (k if group_size == -1 else 128)
        sums = np.repeat(signs * (k // columns), columns, 1).astype("int32")
        out = run(compiled, [words, np.ones((2, columns), "float32"), sums], parts, layout)
        np.testing.assert_array_equal(out, np.repeat(signs * k * (-8 if symmetric else 15), 16, 1))


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=SLOW), "sm_90"])
def test_every_code_meets_its_activation(arch):
    """One-hot rows read single weights: the columns of both halves of bytes are the same."""
    layout = layout_of(16, 64, "int4", group_size=64)
    parts = weight(np.random.default_rng(0), layout)
    parts[1][:] = 1
    compiled = CudaText(scheduled(plain(layout, 64), TARGETS[arch]), TARGETS[arch])
    eye = np.eye(64, dtype="int64") * -3
    x = [as_words(eye, layout), np.ones((64, 1), "float32"), np.full((64, 1), -3, "int32")]
    np.testing.assert_array_equal(run(compiled, x, parts, layout), -3 * unpack(parts, layout).T)


LEFT = (r"(\n +tvm\w+mma\w+\((?:\S+ ){4})(\S+) (\S+)", r"\1\3 \2")
RIGHT = (r"(\n +tvm\w+mma\w+\((?:\S+ ){8})(\S+) (\S+)", r"\1\3 \2")
FAULTS = {
    "sm_80 a sign": ("sm_80", 64, True, r"\(uint\)2290649224", "(uint)2290649216"),
    "sm_80 registers of the left factor": ("sm_80", 64, True, *LEFT),
    "sm_80 registers of the right factor": ("sm_80", 64, True, *RIGHT),
    "sm_80 start of sums": ("sm_80", 64, True, r"\(uint\)1262485504", "(uint)1262485505"),
    "sm_80 the other half": ("sm_80", 32, False, r"\(~(_ptr_1\[0\])\)", r"\1"),
    "sm_80 half of a mask": ("sm_80", 32, False, r"\(uint\)4042322161", "(uint)4042322160"),
    "sm_80 zero point": ("sm_80", 32, False, r"& \(uint\)15\)", "& (uint)7)"),
    "sm_90 lower halves as upper": ("sm_90", 64, False, r"<< \(uint\)4\)", "<< (uint)0)", -1),
    "sm_90 half of a mask": ("sm_90", 64, False, r"\(uint\)4042322161", "(uint)4042322160"),
    "sm_90 zero point": ("sm_90", 64, False, r"<< \(uint\)8\)", "<< (uint)7)"),
    "sm_90 registers of the right factor": ("sm_90", 64, False, *RIGHT),
    "sm_90 sums of the other token": (
        "sm_90",
        64,
        False,
        r"(ld_vec_shared_v2_b32\([^;]*\+ )1792",
        r"\g<1>1800",
    ),
}


@cache
def small(arch, group_size, symmetric):
    layout = layout_of(40, 200, "int4", group_size=group_size, symmetric=symmetric)
    func = scheduled(plain(layout, 7), TARGETS[arch], **{"2-8": (1, 1, 1, 1, 1, 2, 2)})
    rng = np.random.default_rng(1)
    arguments, x = activations(rng, 7, layout)
    return CudaText(func, TARGETS[arch]), arguments, x, weight(rng, layout), layout


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_numbers_are_seen(fault):
    arch, group_size, symmetric, *edit = FAULTS[fault]
    compiled, arguments, x, parts, layout = small(arch, group_size, symmetric)
    assert_close(run(compiled, arguments, parts, layout), x, parts, layout)
    with pytest.raises(AssertionError, match="off by"):
        assert_close(run(edited(compiled, *edit), arguments, parts, layout), x, parts, layout)


def test_tiles_that_there_are_not():
    layout = layout_of(256, 1024, "int4", group_size=128)
    _, operands = _recognise(plain(layout, 64), TARGETS["sm_90a"])
    tile = Tile(2, 8, 4, 1, 1, 4, 3, wgmma=1)
    assert tile_fault(operands, tile, TARGETS["sm_90a"]) == "wgmma multiplies no INT4"
    for arch, target in TARGETS.items():
        for rows in (None, 1, 5, 16, 64, 200, 4096):
            func = plain(layout, rows)
            _, operands = _recognise(func, target)
            assert operands.has_int4_products == (arch in ("sm_80", "sm_89"))
            for space in TensorCoreMatmul().spaces(func, target).values():
                assert tile_fault(operands, space.default, target) is None
                assert not space.default.wgmma


NATIVE, EXACT = "IMMA.16864", "IMMA.16832.S8.S8"
COUNTS = [
    ("sm_80", 1, {}, NATIVE, 0.84),
    ("sm_90", 16, {}, EXACT, 1.37),
    *(
        pytest.param(*count, marks=SLOW)
        for count in [
            ("sm_80", 16, {}, NATIVE, 0.80),
            ("sm_80", 1, {"group_size": -1}, NATIVE, 0.39),
            ("sm_80", 16, {"group_size": -1}, NATIVE, 0.48),
            ("sm_80", 32, {}, NATIVE, 1.25),
            ("sm_80", 64, {}, NATIVE, 2.7),
            ("sm_80", 64, {"group_size": -1}, NATIVE, 1.05),
            ("sm_80", 4096, {}, NATIVE, 2.5),
            ("sm_80", 4096, {"group_size": -1}, NATIVE, 1.3),
            ("sm_89", 1, {"group_size": 32, "symmetric": False}, NATIVE, 2.5),
            ("sm_90a", 1, {}, EXACT, 1.25),
            ("sm_90", 1, {"group_size": -1}, EXACT, 1.1),
            ("sm_90", 16, {"group_size": -1}, EXACT, 1.15),
            ("sm_90", 4096, {}, EXACT, 3.5),
            ("sm_90", 4096, {"group_size": -1}, EXACT, 2.2),
            ("sm_90", 16, {"symmetric": False}, "IMMA.16832.U8.S8", 1.65),
        ]
    ),
]


@pytest.mark.parametrize(
    ("arch", "rows", "group_size"),
    [
        ("sm_80", 1, 128),
        ("sm_90", 16, 128),
        pytest.param("sm_80", 8, 32, marks=SLOW),
        pytest.param("sm_80", 4096, -1, marks=SLOW),
        pytest.param("sm_90", 4096, 64, marks=SLOW),
    ],
)
def test_work_is_that_of_machine_code(arch, rows, group_size):
    """Static tuning goes by it: products, by number, and what decodes, at least."""
    target, rule = TARGETS[arch], TensorCoreMatmul()
    func = plain(layout_of(4096, 4096, "int4", group_size=group_size), rows)
    code = machine_code(4096, 4096, rows, "int4", arch=arch, group_size=group_size)
    work, executed = rule.work(func, target)(code.tile), code.executed()
    (product,) = {line.opcode for line in code.instructions if "MMA" in line.family}
    assert work.opcodes[product] == executed[product] == code.products
    assert work.multiply_adds == executed[product] * multiply_adds(product)
    assert executed["LDS.128"] >= work.opcodes["LDS.128"]
    assert executed["LOP3.LUT"] >= work.opcodes["LOP3.LUT"]
    assert (rule.workload(func, target).family, rule.workload(func, target).dtype) == (
        "int8_matmul",
        "int4",
    )


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_a_workload_gives_its_function_and_arguments_back(rng, group_size):
    """Sums of groups, which a tuning run draws, are those of the packed codes."""
    rule, layout = TensorCoreMatmul(), layout_of(40, 192, "int4", group_size=group_size)
    workload = rule.workload(plain(layout, 3), TARGETS["sm_80"])
    x, _, sums, *_ = rule.inputs(workload, 3, rng)
    assert rule.workload(rule.prim_func(workload, 3), TARGETS["sm_80"]) == workload
    halves = x.view("int8").reshape(3, -1, 1, 32)
    codes = np.concatenate([np.left_shift(halves, 4) >> 4, halves >> 4], 2).reshape(3, -1)
    expected = codes[:, : layout.padded_k].reshape(3, layout.groups, -1).sum(-1, dtype="int64")
    np.testing.assert_array_equal(sums, expected)
    assert np.abs(codes).max() == 7


@pytest.mark.parametrize(("arch", "rows", "spec", "product", "per_weight"), COUNTS)
def test_machine_code(arch, rows, spec, product, per_weight):
    """INT4 on tensor cores that have it, INT8 on the others, without a call to emulate it."""
    code = machine_code(4096, 4096, rows, "int4", arch=arch, **{"group_size": 128, **spec})
    opcodes = {line.opcode for line in code.instructions if "MMA" in line.family}
    assert len(opcodes) == 1
    assert opcodes.pop().startswith(product)
    assert code.spills == 0
    assert not any(line.family in ("CALL", "LDL", "STL") for line in code.instructions)
    assert code.per_weight() < per_weight
