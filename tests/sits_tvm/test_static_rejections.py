"""Kernels that are not worth an estimate, each for one reason."""

from dataclasses import replace

import pytest
from sass_text import sass

from sits_tvm.device_code.sass_loops import times_executed
from sits_tvm.tuning.static_constants import A100, H200
from sits_tvm.tuning.static_model import KernelLaunch
from sits_tvm.tuning.static_rejections import rejections

GOOD = (
    "LDGSTS.E.BYPASS.128 [R1],[R2]",
    "LDG.E.U16 R3,[R4]",
    "IMMA.16832.S8.S8 R8,R4",
    "@P0 BRA 0x0",
    "EXIT",
    "CALL.REL.NOINC $never",
)
LAUNCH = KernelLaunch(blocks=132, threads=128, registers=96, shared=24 << 10, hbm_bytes=0)
TRIPS = 32
WEIGHTS = 132 * 128 * 16 * TRIPS  # bytes


def found(lines=GOOD, launch=LAUNCH, device=H200, **given):
    given = {"spills": 0, "weight_bytes": WEIGHTS, "most_blocks": 10_000, **given}
    code = sass(*lines)
    times = times_executed(code, {0: TRIPS})
    return rejections(code, times, launch, device=device, **given)


def test_a_good_kernel_is_not_rejected():
    """What is behind the last EXIT, uncalled, is not executed."""
    assert found() == []


def test_spills_and_local_memory():
    assert found(spills=8) == ["8 bytes are spilled"]
    assert found((*GOOD[:2], "STL [R1],R2", *GOOD[2:])) == [
        "local memory is accessed by 1 instructions"
    ]
    assert found((*GOOD[:2], "LDL R2,[R1]", *GOOD[2:])) == [
        "local memory is accessed by 1 instructions"
    ]


def test_products_that_wait():
    assert found(waits=2) == ["2 waits for products of warpgroups"]


def test_calls_of_routines():
    assert found((*GOOD[:3], "CALL.REL.NOINC $div", *GOOD[3:])) == ["calls $div"]


def test_int4_operands_are_emulated_on_hopper_only():
    routine = "$__internal_0_$__cuda_sm_9x_mma_sub_byte_internal_s4"
    calls, mma = found((*GOOD[:3], f"CALL.REL.NOINC {routine}", *GOOD[3:]))
    assert calls == f"calls {routine}"
    assert mma == "an MMA has INT4 operands, which sm_90 emulates"
    native = ("LDGSTS.E.BYPASS.128 [R1]", "IMMA.16864.S4.S4 R1", "@P0 BRA 0x0", "EXIT")
    assert found(native, device=A100) == []
    assert found(native) == [mma]
    assert found(tuple(x.replace("S4.S4", "U4.U4") for x in native)) == [mma]


def test_narrow_loads_of_weights():
    narrow = ("LDG.E.64 R1,[R2]", *GOOD[1:])
    assert found(narrow) == [f"128-bit loads move 0 of {WEIGHTS} bytes of weights"]
    assert found(weight_bytes=WEIGHTS + 1)[0].startswith(f"128-bit loads move {WEIGHTS} of")
    assert found(("UTMALDG.2D [R1]", *narrow[1:])) == []


def test_resources_of_a_block():
    assert found(launch=replace(LAUNCH, shared=232448)) == []
    too_much = found(launch=replace(LAUNCH, shared=232449))
    assert too_much == ["232449 bytes of shared memory, of 232448"]
    assert found(launch=replace(LAUNCH, shared=200_000), device=A100) == [
        "200000 bytes of shared memory, of 166912"
    ]
    (reason,) = found(launch=replace(LAUNCH, registers=255, threads=512, blocks=32 * 132))
    assert "too few registers" in reason


@pytest.mark.parametrize(("blocks", "most", "reasons"), [(131, 132, 1), (131, 131, 0), (64, 64, 0)])
def test_blocks_that_leave_sms_idle(blocks, most, reasons):
    launch = replace(LAUNCH, blocks=blocks)
    reasons_found = found(launch=launch, most_blocks=most, weight_bytes=0)
    assert len(reasons_found) == reasons
    if reasons:
        assert reasons_found == ["131 blocks for 132 SMs, where 132 are possible"]
