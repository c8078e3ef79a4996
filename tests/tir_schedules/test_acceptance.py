"""The acceptance lines: a kernel that keeps all of them, and what each one catches."""

from dataclasses import replace

import pytest
from acceptance import accept, products
from dlight_gemv import dlight_gemv

from sits_tvm.device_code.sass import Instruction
from sits_tvm.tuning.static_model import KernelLaunch

LAUNCH = KernelLaunch(
    blocks=264, threads=128, registers=96, shared=32 << 10, hbm_bytes=0, in_flight=24 << 10
)
N, K = 33792, 1024
LOP3, HMMA = Instruction("LOP3.LUT", "R1"), Instruction("HMMA.16816.F32", "R8,R4,R6,R8")


def kernel(alu=1, mma=1, product=HMMA, load="LDGSTS.E.BYPASS.128"):
    """A loop that loads 16 bytes of weights and does 4 steps of so many instructions each.

    A thread of W[33792, 1024] has 1024 weights: 32 trips.
    """
    return [
        *[Instruction("MOV", "R1,RZ")] * 2,
        Instruction(load, "[R1],[R2]"),
        *[*[LOP3] * alu, *[product] * mma] * 4,
        Instruction("BRA", "0x20", "@P0"),
        Instruction("STG.E", "[R1],R2"),
        Instruction("EXIT", ""),
    ]


def judged(code=None, **given):
    given = {"kind": "W4A16 g128", "n": N, "k": K, "rows": 8, "launch": LAUNCH, **given}
    return accept(code or kernel(), **given)


def test_a_thread_has_its_share_of_weights_and_products():
    """An MMA is 16 x 16 weights by 8 rows."""
    assert N * K == 264 * 4 * 128 * 16 * 16
    assert products(kernel(), N, K, 8, 8, LAUNCH) == 128
    assert products(kernel(), N, K, 3, 8, LAUNCH) == 128
    assert products(kernel(), N, K, 9, 8, LAUNCH) == 256
    assert products(kernel(), N, K, 9, 16, LAUNCH) == 256
    assert products(kernel(), N, K, 9, 32, LAUNCH) == 512


def test_a_kernel_that_keeps_all_lines():
    """32 trips of 10 instructions, and 4 more."""
    found = judged()
    assert found.failures == found.once == []
    assert (found.per_weight, found.per_mma) == (324 / 1024, 324 / 128)
    assert (found.loop_per_weight, found.loop_per_mma) == (320 / 1024, 320 / 128)


def test_each_tile_of_rows_decodes_again():
    """9 rows in tiles of 8 are two tiles: twice the trips, and twice the weights."""
    found = judged(rows=9)
    assert (found.per_weight, found.per_mma) == (644 / 2048, 644 / 256)
    found = judged(kernel(mma=2), rows=9, tile_rows=16)
    assert (found.per_weight, found.per_mma) == ((32 * 14 + 4) / 1024, (32 * 14 + 4) / 256)


def test_the_table_shows_what_others_need():
    text = str(judged())
    rows = {line[:24].strip(): line.split() for line in text.splitlines()}
    assert rows["this, executed"][-2:] == ["2.53", "0.32"]
    assert rows["this, main loop"][-2:] == ["2.50", "0.31"]
    assert rows["Marlin"][-2:] == ["9.80", "2.45"]
    assert "QQQ" not in rows
    assert text.splitlines()[-1] == "all lines are kept"
    text = str(judged(kernel(alu=17), kind="W4A8 per channel"))
    assert {"QQQ", "QServe"} <= {line.split("  ")[0] for line in text.splitlines()}
    assert text.splitlines()[-1].startswith("not kept: 2.3")


@pytest.mark.parametrize(
    ("kind", "rows", "tile", "alu", "line"),
    [
        ("W4A16 g128", 16, 8, 14, None),  # 1.94
        ("W4A16 g128", 16, 8, 15, "per weight, of 2.0"),  # 2.06
        ("W4A8 g128", 8, 8, 11, "per weight, of 1.5"),
        ("W4A8 per channel", 8, 8, 7, "per weight, of 1.0"),
        ("W4A8 per channel", 17, 32, 6, None),
        ("W4A8 per channel", 64, 32, 11, "per weight, of 1.8"),
        ("W4A16 g128", 32, 32, 15, None),  # 4.88 per MMA
        ("W4A16 g128", 32, 32, 16, "per HMMA.16816, of 5.0"),
        ("W4A16 g128", 64, 64, 12, None),  # 2.57
        ("W4A16 g128", 64, 64, 13, "per weight, of 2.6"),
        ("W4A8 g128", 64, 64, 12, "per weight, of 2.5"),
        ("W4A16 per channel", 256, 32, 9, None),
        ("W4A16 per channel", 256, 32, 10, "per HMMA.16816, of 3.5"),
    ],
)
def test_instructions_beyond_a_line(kind, rows, tile, alu, line):
    """`tile` rows are `tile // 8` products per step."""
    launch = replace(LAUNCH, in_flight=64 << 10)
    code = kernel(alu, mma=tile // 8)
    found = judged(code, kind=kind, rows=rows, tile_rows=tile, launch=launch).failures
    assert [x.partition(" instructions ")[2] for x in found] == ([line] if line else [])


def test_int8_products_have_a_line_of_their_own():
    """m16n8k32: half as many."""
    imma = Instruction("IMMA.16832.S8.S8", "R8,R4,R6,R8")
    launch = replace(LAUNCH, in_flight=64 << 10)
    given = {"kind": "W4A8 g128", "rows": 256, "tile_rows": 32, "launch": launch}
    assert products(kernel(product=imma), N, K, 8, 8, LAUNCH) == 64
    assert judged(kernel(13, 4, imma), **given).failures == []
    (found,) = judged(kernel(14, 4, imma), **given).failures
    assert found.endswith("instructions per IMMA.16832, of 4.5")


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        ({"spills": 16}, "16 bytes are spilled"),
        (
            {"code": kernel(load="LDG.E.64")},
            f"128-bit loads move 0 of {N * K // 2} bytes of weights",
        ),
        ({"most_blocks": 1000, "blocks": 131}, "131 blocks for 132 SMs, where 1000 are possible"),
        ({"in_flight": 20479}, "40958 bytes in flight per SM, of 40960"),
        ({"in_flight": None}, "0 bytes in flight per SM, of 40960"),
        ({"in_flight": 32767, "rows": 65}, "65534 bytes in flight per SM, of 65536"),
        (
            {"code": kernel(product=Instruction("HMMA.16816.F16", "R8"))},
            "HMMA.16816.F16 sums in float16",
        ),
        ({"threads": 96}, "6 warps per SM, of 8"),
    ],
)
def test_each_line_is_looked_at(given, failure):
    changed = {x: given[x] for x in ("blocks", "in_flight", "threads") if x in given}
    others = {x: value for x, value in given.items() if x not in changed}
    assert failure in judged(launch=replace(LAUNCH, **changed), **others).failures


def test_loops_without_products_are_named():
    code = kernel()
    code[-1:] = [Instruction("LDS", "R1"), Instruction("BRA", "0xd0", "@P0"), code[-1]]
    found = judged(code)
    assert found.once == [13]
    assert str(found).splitlines()[-1] == "the loop at 13 counts once"
    assert judged(code, known={13: 10}).once == []
    assert judged(code, known={13: 10}).per_weight == found.per_weight + 18 / 1024


def test_a_kind_without_lines_is_refused():
    with pytest.raises(KeyError):
        judged(kind="W4A4")


def test_the_gemv_kernel_of_dlight_is_far_from_the_lines():
    code, launch = dlight_gemv()
    found = accept(code, kind="W4A16 g128", n=4096, k=4096, rows=1, launch=launch)
    assert 7 < found.per_weight < 8
    assert found.per_mma is None
    assert len(found.failures) == 3
    for failure, start in zip(found.failures, ["128-bit loads", "0 bytes in", "7."], strict=True):
        assert failure.startswith(start)
