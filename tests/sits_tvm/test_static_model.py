"""The static model: each term by hand, what it must not do, and what others have measured."""

import itertools
from dataclasses import replace

import pytest

from sits_tvm.device_code.sass_pipes import demand
from sits_tvm.tuning.static_constants import A100, H100, H200, MODEL_VERSION, device_of
from sits_tvm.tuning.static_model import (
    Estimate,
    KernelLaunch,
    estimate,
    is_tie,
    resident_blocks,
)

LATENCY = 1e-6
SMALL = KernelLaunch(blocks=132, threads=128, registers=64, shared=0, hbm_bytes=0)


def terms(opcodes, launch=SMALL, device=H200):
    return estimate(demand(opcodes, device.arch), launch, device).terms


def test_issue_takes_a_clock_per_instruction_and_scheduler():
    """One block of 4 warps per SM: each scheduler has one."""
    assert terms({"BRA": 1830})["issue"] == pytest.approx(1e-6)


@pytest.mark.parametrize(("threads", "warps"), [(32, 1), (128, 1), (160, 2), (256, 2), (257, 3)])
def test_the_scheduler_with_most_warps_ends_last(threads, warps):
    launch = replace(SMALL, threads=threads)
    assert terms({"LOP3.LUT": 1830}, launch)["alu"] == pytest.approx(warps * 2e-6)


def test_load_store_units_serve_all_schedulers():
    """A warp's LDS.128 is 512 bytes at 128 per clock, an instruction per clock."""
    found = terms({"LDS.128": 183}, replace(SMALL, threads=32))
    assert found["lsu"] == pytest.approx(1e-7)
    assert found["l1"] == pytest.approx(4e-7)


def test_tensor_cores_take_what_the_data_sheet_says():
    """A100: 2 * 2048 flop of 312 TFLOP/s over 108 SMs are 1.41 ns; a warp per scheduler."""
    launch = replace(SMALL, blocks=108)
    found = terms({"HMMA.16816.F32": 1000}, launch, A100)["tensor"]
    assert found == pytest.approx(4000 * 2 * 2048 / (312e12 / 108), rel=2e-3)


@pytest.mark.parametrize(("device", "rate"), [(A100, 2.039e12), (H100, 3.35e12), (H200, 4.8e12)])
def test_memory_moves_its_bytes_at_the_rate_of_the_data_sheet(device, rate):
    found = terms({"EXIT": 1}, replace(SMALL, hbm_bytes=48 << 20), device)["hbm"]
    assert found == pytest.approx((48 << 20) / rate)


def test_parts_that_the_cache_does_not_hold_go_through_memory():
    launch = replace(SMALL, hbm_bytes=24 << 20, in_flight=24 << 10)
    more = replace(launch, beyond_l2=24 << 20)
    assert terms({"EXIT": 1}, more)["hbm"] == pytest.approx((48 << 20) / 4.8e12)
    assert terms({"EXIT": 1}, more)["in flight"] == terms({"EXIT": 1}, launch)["in flight"]


def test_l2_moves_what_all_blocks_load_and_store():
    """132 blocks of 128 threads with 16 + 2 bytes, at 5120 bytes per clock."""
    found = terms({"LDG.E.128": 1, "STG.E.U16": 1})["l2"]
    assert found == pytest.approx(132 * 128 * 18 / 5120 / 1.83e9)


def test_copies_go_through_l2_and_shared_memory():
    """10 of 16 bytes per thread as executed at most; or the 8 that the caller knows of."""
    for launch, bytes_ in [(SMALL, 128 * 160), (replace(SMALL, copied=128 * 128), 128 * 128)]:
        found = terms({"LDGSTS.E.BYPASS.128": 10}, launch)
        assert found["l2"] == pytest.approx(132 * bytes_ / 5120 / 1.83e9)
        assert found["l1"] == pytest.approx(bytes_ / 128 / 1.83e9)
        assert found["lsu"] == pytest.approx(4 * 10 / 1.83e9)


@pytest.mark.parametrize("blocks", [132, 1056])
def test_bytes_in_flight_come_once_per_latency(blocks):
    """Little's law: 24 KiB of a block at a time; up to 1056 blocks fit at once."""
    launch = replace(SMALL, hbm_bytes=blocks * 10 * (24 << 10), in_flight=24 << 10, blocks=blocks)
    assert terms({"EXIT": 1}, launch)["in flight"] == pytest.approx(10 * LATENCY)


def test_the_longest_term_and_the_start_make_the_time():
    launch = replace(SMALL, hbm_bytes=48 << 20)
    found = estimate(demand({"BRA": 1830}, "sm_90"), launch)
    assert (found.bound, found.seconds) == ("hbm", pytest.approx((48 << 20) / 4.8e12 + LATENCY))
    found = estimate(demand({"BRA": 183000}, "sm_90"), launch)
    assert (found.bound, found.seconds) == ("issue", pytest.approx(100e-6 + LATENCY))


def test_blocks_beyond_those_that_fit_wait():
    """4 blocks of 512 threads fit an SM: 528; of 529, one more takes as long as on all SMs."""
    launch = replace(SMALL, threads=512, registers=32)
    one = terms({"BRA": 1830}, launch)["issue"]
    for blocks, most in [(132, 1), (133, 2), (528, 4), (529, 5), (1056, 8), (1057, 9), (1320, 10)]:
        found = estimate(demand({"BRA": 1830}, "sm_90"), replace(launch, blocks=blocks))
        assert found.terms["issue"] == pytest.approx(most * one)
        assert (found.resident, found.waves) == (4, blocks / 528)


def test_each_wave_waits_for_its_own_longest_term():
    """A full wave is bound by issue (4 blocks per SM); the last block alone by its bytes."""
    launch = replace(SMALL, threads=512, registers=32, blocks=529)
    launch = replace(launch, hbm_bytes=529 * 1830, in_flight=183)  # 10 us per block
    found = estimate(demand({"BRA": 1830}, "sm_90"), launch)
    assert found.seconds == pytest.approx(16e-6 + 10e-6 + LATENCY)
    assert found.terms["in flight"] == pytest.approx(20e-6)
    assert found.bound == "issue"  # 16 of the 26 us


# Registers, shared memory in KiB, warps of a block; warps of an SM. From the table of kernels in
# the survey that the acceptance lines come from: NVIDIA's rules by another hand.
OCCUPANCY = [
    (96, 24, 4, 20),
    (160, 40, 4, 12),
    (112, 24, 4, 16),
    (168, 40, 4, 12),
    (42, 1.5, 8, 40),
    (72, 3, 8, 24),
    (124, 56, 8, 16),
    (166, 49, 4, 12),
    (16, 100, 8, 16),  # by shared memory: two of 101 KiB
    (96, 0, 7, 14),  # by registers: 20 warps, not the 21 that there is room for
    (16, 0, 1, 32),  # by blocks
    (16, 0, 16, 64),  # by warps
]


@pytest.mark.parametrize(("registers", "shared", "warps", "expected"), OCCUPANCY)
def test_as_many_blocks_fit_as_nvidia_says(registers, shared, warps, expected):
    launch = replace(SMALL, registers=registers, shared=int(shared * 1024), threads=32 * warps)
    assert resident_blocks(launch, H100) * warps == expected


def test_a_block_that_fits_no_sm_is_refused():
    with pytest.raises(ValueError, match="H200: too few registers"):
        resident_blocks(replace(SMALL, threads=1024, registers=128), H200)
    with pytest.raises(ValueError, match="A100: too few shared memory"):
        resident_blocks(replace(SMALL, shared=164 << 10), A100)


def variants():
    """Launches and opcodes, and the same with more of one thing."""
    opcodes = {"HMMA.16816.F32": 64, "LOP3.LUT": 300, "LDS.128": 40, "LDGSTS.E.BYPASS.128": 40}
    sizes = [(64, 20 << 20, 16 << 10), (700, 1 << 20, 1 << 10), (5000, 200 << 20, 24 << 10)]
    for (blocks, size, flying), device in itertools.product(sizes, (A100, H100, H200)):
        launch = KernelLaunch(
            blocks=blocks, threads=128, registers=96, shared=40 << 10, hbm_bytes=size,
            in_flight=flying,
        )  # fmt: skip
        yield opcodes, launch, device


@pytest.mark.parametrize(("opcodes", "launch", "device"), variants())
def test_more_to_do_never_takes_less(opcodes, launch, device):
    def seconds(opcodes=opcodes, **changed):
        changed_launch = replace(launch, **changed)
        return estimate(demand(opcodes, device.arch), changed_launch, device).seconds

    before = seconds()
    for opcode in opcodes:
        assert seconds({**opcodes, opcode: 2 * opcodes[opcode]}) >= before
    assert seconds({**opcodes, "LOP3.LUT": 100_000}) > before
    assert seconds(hbm_bytes=2 * launch.hbm_bytes) >= before
    assert seconds(hbm_bytes=100 * launch.hbm_bytes) > before
    assert seconds(in_flight=launch.in_flight // 16) > before
    assert seconds(in_flight=launch.in_flight * 2) <= before
    twice = {"blocks": 2 * launch.blocks, "hbm_bytes": 2 * launch.hbm_bytes}
    assert seconds(**twice) >= before


def test_faster_memory_never_takes_longer():
    for opcodes, launch, _ in variants():
        found = [estimate(demand(opcodes, "sm_90"), launch, x).seconds for x in (H200, H100)]
        assert found[0] <= found[1]


def test_within_a_tenth_there_is_no_order():
    def of(seconds):
        return Estimate("H200", seconds, "hbm", {}, 1, 1.0, {})

    assert is_tie(of(1e-6), of(1.09e-6))
    assert is_tie(of(1.09e-6), of(1e-6))
    assert not is_tie(of(1e-6), of(1.11e-6))
    assert not is_tie(of(1.11e-6), of(1e-6))


def test_an_estimate_prints_what_rules_and_what_is_unknown():
    found = estimate(demand({"UTMALDG.2D": 1, "BRA": 1830}, "sm_90"), SMALL)
    (
        first,
        second,
        header,
        *_,
    ) = str(found).splitlines()
    assert first.startswith("H200: at least 2.00 us, bound by issue; 8 blocks per SM, 0.12 waves")
    assert first.endswith(f"(model {MODEL_VERSION})")
    assert second == "for issue only: UTMALDG.2D"
    assert header.split() == ["term", "us"]


def test_architectures_without_a_model_are_refused():
    assert (device_of("sm_80"), device_of("sm_90"), device_of("sm_90a")) == (A100, H200, H200)
    with pytest.raises(ValueError, match="no static model of 'sm_89'"):
        device_of("sm_89")
