"""The static model puts kernels that are known to be bad behind the default, from machine code."""

from dataclasses import replace
from functools import cache

import pytest
from cuda_sources import needs_nvcc
from dlight_gemv import dlight_gemv

from sits_tvm import parse_target
from sits_tvm.device_code import find_toolkit
from sits_tvm.device_code.sass import count
from sits_tvm.device_code.sass_loops import MMA, main_loop, times_executed
from sits_tvm.device_code.sass_pipes import demand, opcode_counts
from sits_tvm.tuning.static_code import (
    compile_kernels,
    estimates,
    judge,
    lower_candidate,
    screen,
)
from sits_tvm.tuning.static_constants import H200, TIE
from sits_tvm.tuning.static_model import estimate
from sits_tvm.tuning.tasks import Task
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul, _recognise
from tir_schedules.records.workloads import MatmulWorkload

GPU = parse_target("cuda -arch=sm_90")
RULE = TensorCoreMatmul()
HALF = MatmulWorkload("int4_matmul", 4096, 4096, 128, True, "float16", "float16")
INT8 = replace(HALF, family="int8_matmul", dtype="int8")
SMALL = replace(HALF, n=1024)
pytestmark = needs_nvcc


def task_of(workload, rows):
    ((bucket, space),) = RULE.spaces(RULE.prim_func(workload, rows), GPU).items()
    return Task(RULE, workload, bucket, space, GPU)


@cache
def candidate_of(workload, rows, **changed):
    task = task_of(workload, rows)
    values = {**task.space.default_values, **changed}
    work = RULE.work(task.func, GPU)(task.space.with_values(values))
    return lower_candidate(task, values, work)


@cache
def trial(workload, rows, **changed):
    return judge(candidate_of(workload, rows, **changed), H200, "sm_90", find_toolkit())


def is_behind(bad, good):
    return bad.seconds > (1 + TIE) * good.seconds


def test_dlight_is_behind_the_default():
    code, launch = dlight_gemv()
    needed = demand(opcode_counts(code, times_executed(code)), "sm_90")
    assert is_behind(estimate(needed, launch), trial(HALF, 1))


BAD = {
    "two stages": (HALF, 1, {"stages": 2}),
    "one warp": (HALF, 1, {"warps_k": 1}),
    "one row, one block along k": (SMALL, 1, {"split": 1}),
    "few rows, one block along k": (SMALL, 16, {"split": 1}),
    "decoding for each tile of tokens": (HALF, 1024, {"tokens": 1}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tile_is_behind_the_default(name):
    workload, rows, changed = BAD[name]
    assert is_behind(trial(workload, rows, **changed), trial(workload, rows))


def test_a_tile_that_spills_is_rejected():
    found = trial(HALF, 1024, channels=4, warps_n=2, warps_m=2, stages=3)
    assert (found.seconds, found.failure) == (None, "spilled")


@pytest.mark.parametrize("rows", [1, 16, 1024])
@pytest.mark.parametrize("workload", [HALF, INT8], ids=["half", "int8"])
def test_no_estimate_is_below_what_is_known_without_machine_code(workload, rows):
    candidate = candidate_of(workload, rows)
    least = screen(candidate.work, H200)
    assert 0.7 * trial(workload, rows).seconds < least <= trial(workload, rows).seconds


def test_two_kernels_take_the_sum():
    candidate = candidate_of(SMALL, 16)
    kernels = compile_kernels(candidate.source, "sm_90", find_toolkit())
    found = estimates(candidate, kernels, H200)
    assert len(found) == 2
    assert trial(SMALL, 16).seconds == sum(one.seconds for one in found)
    (second,) = [k for k in kernels if not any(line.family in MMA for line in k.code)]
    assert len(main_loop(second.code)) == 0


EXACT = {"channels": 4, "tokens": 1, "warps_n": 1, "warps_m": 1, "units": 8, "stages": 2}
WIDTHS = {"LDGSTS.E.BYPASS.128": 16, "LDGSTS.E.128": 16, "LDGSTS.E": 4}


@pytest.mark.parametrize("warps_k", [1, 2])
@pytest.mark.parametrize("workload", [HALF, INT8], ids=["half", "int8"])
def test_copied_bytes_are_those_of_machine_code(workload, warps_k):
    """With tiles that leave no thread without a piece: LDGSTS of the loop, and their bytes."""
    workload = replace(workload, group_size=32, symmetric=False)
    changed = {**EXACT, "warps_k": warps_k, "split": 1}
    candidate = candidate_of(workload, 8, **changed)
    (kernel,) = compile_kernels(candidate.source, "sm_90", find_toolkit())
    counts = count(main_loop(kernel.code))
    copies = {name: n for name, n in counts.items() if name.startswith("LDGSTS")}
    per_stage = sum(WIDTHS[name] * n for name, n in copies.items()) * 32 * warps_k
    task = task_of(workload, 8)
    _, operands = _recognise(task.func, GPU)
    tile = task.space.with_values(candidate.values)
    assert operands.stage(tile).copied == per_stage
    assert candidate.work.copied == per_stage * 4096 // (8 * 64 * warps_k)


def test_work_of_a_tile():
    """A stage is 16 channels by 8 units of 64 columns, 4096 bytes of codes; k is 64 units."""
    work = candidate_of(SMALL, 1, split=1).work
    assert (work.blocks, work.threads) == (64, 64)
    assert work.in_flight == 3 * 4096
    assert work.weight_bytes == 1024 * 4096 // 2
    scales = 1024 * 32 * 2
    assert work.hbm_bytes == work.weight_bytes + scales + 4096 * 2 + 1024 * 2
    assert work.multiply_adds * work.blocks * 2 == 1024 * 4096 * 8
    assert work.output_bytes == 0
    short = candidate_of(replace(SMALL, k=512), 1, warps_k=2, stages=8).work
    assert short.in_flight == 4096


def test_parts_count_for_memory_where_they_are_more_than_the_cache():
    """Eight parts of 256 x 28672 sums are 235 MB: each kernel moves what is over 50 MiB."""
    wide = replace(HALF, n=28672)
    candidate = candidate_of(wide, 256, split=8)
    assert candidate.work.partial_bytes == 8 * 256 * 28672 * 4
    kernels = compile_kernels(candidate.source, "sm_90", find_toolkit())
    over = (candidate.work.partial_bytes - (50 << 20)) / 4.8e12
    for found in estimates(candidate, kernels, H200):
        assert found.terms["hbm"] > over
    assert candidate_of(HALF, 16).work.partial_bytes < 50 << 20
    assert task_of(HALF, 1024).space.values("split") == [1]


def test_work_of_parts_along_k():
    """Four blocks for a tile of channels; the second kernel writes the output."""
    work = candidate_of(HALF, 16).work
    assert work.blocks == 32 * 4
    assert work.output_bytes == 16 * 4096 * 2
    weight = 4096 * 4096 // 2 + 4096 * 32 * 2
    assert work.hbm_bytes == weight + 16 * 4096 * 2
    assert work.multiply_adds * work.blocks * 4 == 4096 * 4096 * 16
