"""How often a thread executes each instruction: loops of machine code, by hand and from nvcc."""

import tempfile
from pathlib import Path

import pytest
from cuda_sources import needs_nvcc
from sass_text import sass

from sits_tvm.device_code.nvcc import compile_text, find_toolkit
from sits_tvm.device_code.sass import count, disassemble
from sits_tvm.device_code.sass_loops import (
    executed,
    executed_for,
    find_loops,
    times_executed,
    trips_for,
)

NESTED = sass(
    "MOV R1,RZ",  # 0x00
    "LDG.E.128 R4,[R2]",  # 0x10: outer loop
    "HMMA.16816.F32 R8,R4,R6,R8",  # 0x20: inner loop
    "@P1 BRA 0x20",  # 0x30
    "STG.E [R2],R8",  # 0x40
    "BRA P0,0x10",  # 0x50
    "EXIT",  # 0x60
    "BRA 0x70",  # 0x70: the trap after EXIT
)
# A loop unrolled by 4, a step in between, a loop for the rest
SPLIT = sass(
    "@!P0 BRA 0x60",  # 0x00
    *["HMMA.16816.F32 R8,R4,R6,R8"] * 4,  # 0x10
    "@P1 BRA 0x10",  # 0x50
    "@!P2 BRA 0xa0",  # 0x60
    "LDG.E.128 R4,[R2]",  # 0x70
    "HMMA.16816.F32 R8,R4,R6,R8",  # 0x80
    "@P3 BRA 0x70",  # 0x90
    "EXIT",  # 0xa0
)


def starts(code):
    return [loop.start for loop in find_loops(code)]


def test_loops_lie_in_one_another():
    outer, inner = find_loops(NESTED)
    assert (sorted(outer.body), sorted(inner.body)) == ([1, 2, 3, 4, 5], [2, 3])
    assert inner.is_inside(outer)
    assert not outer.is_inside(inner)


def test_nested_loops_multiply():
    assert times_executed(NESTED, {1: 3, 2: 5}) == [1, 3, 15, 15, 3, 3, 1, 0]


def test_what_nothing_leads_to_is_not_executed():
    code = sass("CALL.REL.NOINC `$routine", "EXIT", "LOP3.LUT R1,R1", "@P0 BRA 0x20", "RET R2,main")
    assert times_executed(code) == [1, 1, 0, 0, 0]
    assert starts(code) == []


def test_a_call_of_a_bare_address_is_a_jump():
    """As ptxas leaves a loop on sm_80: to the store at 0x30, which nothing else leads to."""
    code = sass("LOP3.LUT R1,R1", "@!P2 CALL.REL.NOINC 0x30", "BRA 0x0", "STG.E [R2],R1", "EXIT")
    assert times_executed(code, {0: 4}) == [4, 4, 4, 1, 1]
    assert count(code)["CALL"] == 0


def test_a_cold_block_behind_exit_counts_once_and_makes_no_loop():
    code = sass("@P0 BRA 0x40", "MOV R1,RZ", "STG.E [R2],R1", "EXIT", "MOV R1,R3", "BRA 0x20")
    assert starts(code) == []
    assert times_executed(code) == [1] * 6


def test_a_cold_block_of_a_loop_belongs_to_it():
    code = sass("@P0 BRA 0x40", "FFMA R1,R1", "@P1 BRA 0x0", "EXIT", "MOV R1,R3", "BRA 0x10")
    (loop,) = find_loops(code)
    assert sorted(loop.body) == [0, 1, 2, 4, 5]


def test_a_loop_entered_at_its_test_starts_there():
    """Its last step falls through to the first instruction."""
    code = sass("BRA 0x20", "FFMA R1,R1", "ISETP P0,R1", "@P0 BRA 0x10", "EXIT")
    (loop,) = find_loops(code)
    assert (loop.start, sorted(loop.body)) == (2, [1, 2, 3])
    assert times_executed(code, {2: 7}) == [1, 7, 7, 7, 1]


def test_two_ways_back_are_one_loop():
    code = sass("MOV R1", "@P0 BRA 0x40", "FFMA R1", "BRA 0x10", "FADD R1", "@P1 BRA 0x10", "EXIT")
    (loop,) = find_loops(code)
    assert sorted(loop.body) == [1, 2, 3, 4, 5]


def test_the_place_where_threads_meet_is_reached():
    assert times_executed(sass("BSSY B0,0x30", "BSYNC B0", "EXIT", "MOV R1", "EXIT")) == [1] * 5


def test_divergent_warps_are_left_out():
    code = sass("BRA.DIV UR4,0x20", "EXIT", "WARPSYNC.COLLECTIVE R5,0x40", "SHFL R1", "BRA 0x10")
    assert times_executed(code) == [1, 1, 0, 0, 0]


def test_a_uniform_predicate_is_a_condition():
    assert times_executed(sass("BRA.U !UP0,0x20", "MOV R1,RZ", "EXIT")) == [1, 1, 1]


def test_padding_is_not_counted():
    assert executed(sass("NOP", "EXIT"))["total"] == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (sass("BRX R2", "EXIT"), "BRX goes where"),
        (
            sass("@P0 BRA 0x20", "FADD R1", "FFMA R1", "@P1 BRA 0x10", "EXIT"),
            "at 1 has a cycle with more than one way in",
        ),
    ],
)
def test_control_flow_that_is_not_understood_is_refused(code, message):
    with pytest.raises(ValueError, match=message):
        times_executed(code)


def test_trips_of_no_loop_are_refused():
    with pytest.raises(ValueError, match=r"no loop starts at \[3\]; loops: \[1, 2\]"):
        times_executed(NESTED, {3: 2})


@pytest.mark.parametrize(("total", "trips"), [(11, (2, 3)), (8, (2, 0)), (3, (0, 3)), (0, (0, 0))])
def test_a_split_loop_runs_unrolled_as_long_as_its_steps_fit(total, trips):
    assert trips_for(SPLIT, total) == dict(zip((1, 7), trips, strict=True))
    assert executed_for(SPLIT, total)["HMMA"] == total
    assert executed_for(SPLIT, total)["LDG.128"] == trips[1]


def test_steps_that_do_not_fit_round_up():
    code = sass(*["IMMA.16832.S8.S8 R1,R1"] * 3, "@P0 BRA 0x0", "EXIT")
    assert trips_for(code, 7) == {0: 3}


def test_steps_before_the_loop_count():
    code = sass("HMMA.16816.F32 R1", "HMMA.16816.F32 R1", "FADD R2", "@P0 BRA 0x10", "EXIT")
    assert trips_for(code, 10) == {1: 9}
    assert trips_for(code, 0) == {1: 0}


def test_a_loop_around_another_must_be_known():
    with pytest.raises(ValueError, match=r"the loop at 1 is around another .*must be known"):
        trips_for(NESTED, 12)
    assert trips_for(NESTED, 12, known={1: 4}) == {1: 4, 2: 3}


def test_another_instruction_may_be_known():
    assert trips_for(NESTED, 12, of="STG") == {1: 12}
    assert trips_for(NESTED, 12, of="LDG.E.128") == {1: 12}


def test_more_than_there_can_be_is_refused():
    with pytest.raises(ValueError, match="9 IMMA wanted; 0 are there"):
        trips_for(NESTED, 9, of="IMMA")


KERNELS = r"""
#include <cstdint>
__device__ void mma(float* c, uint4 a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
               "{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
extern "C" __global__ void __launch_bounds__(32) any(const uint4* a, uint2 b, float4* o, int n) {
  float c[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; i++) mma(c, a[i * 32 + threadIdx.x], b);
  o[threadIdx.x] = make_float4(c[0], c[1], c[2], c[3]);
}
extern "C" __global__ void __launch_bounds__(32) fixed(const uint4* a, uint2 b, float4* o) {
  float c[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (int i = 0; i < 101; i++) mma(c, a[i * 32 + threadIdx.x], b);
  o[threadIdx.x] = make_float4(c[0], c[1], c[2], c[3]);
}
extern "C" __global__ void __launch_bounds__(32) nested(
    const uint4* a, const uint2* b, float4* o, int n) {
#pragma unroll 1
  for (int j = 0; j < n; j++) {
    float c[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < 64; i++) mma(c, a[(j * 64 + i) * 32 + threadIdx.x], b[j]);
    o[j * 32 + threadIdx.x] = make_float4(c[0], c[1], c[2], 1.f / c[3]);
  }
}
"""


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def compiled(request):
    tools = find_toolkit()
    with tempfile.TemporaryDirectory() as folder:
        cubin, _ = compile_text(tools, request.param, KERNELS, Path(folder))
        return disassemble(tools.nvdisasm, cubin)


def loads_and_stores(counts):
    return counts["HMMA"], counts["LDG.E.128"], counts["STG.E.128"]


@needs_nvcc
def test_as_many_loads_as_products_after_unrolling_by_16_8_4_and_1(compiled):
    """nvcc makes three loops and a step of 8 between them of one loop of the source."""
    code = compiled["any"]
    assert len(find_loops(code)) == 3
    for steps in (100, 101, 1000):
        assert loads_and_stores(executed_for(code, steps)) == (steps, steps, 1)


@needs_nvcc
def test_the_trips_of_the_source_come_back(compiled):
    """101 steps are one before the loop and 25 trips of 4."""
    code = compiled["fixed"]
    assert list(trips_for(code, 101).values()) == [25]
    assert loads_and_stores(executed_for(code, 101)) == (101, 101, 1)


@needs_nvcc
def test_nested_loops_of_the_source_multiply(compiled):
    code = compiled["nested"]
    outer, inner = find_loops(code)
    found = executed_for(code, 10 * 64, known={outer.start: 10})
    assert trips_for(code, 10 * 64, known={outer.start: 10})[inner.start] == 64
    assert loads_and_stores(found) == (640, 640, 10)
    assert executed(code, {outer.start: 10, inner.start: 64}) == found
