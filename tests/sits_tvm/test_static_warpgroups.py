"""The static model and products of warpgroups of sm_90a: their work is that of machine code."""

from dataclasses import replace
from functools import cache

import pytest
from cuda_sources import needs_nvcc

from sits_tvm import parse_target
from sits_tvm.device_code import find_toolkit
from sits_tvm.device_code.sass_loops import times_executed, trips_for
from sits_tvm.device_code.sass_pipes import multiply_adds, opcode_counts
from sits_tvm.tuning.static_code import compile_kernels, judge, lower_candidate, reasons, screen
from sits_tvm.tuning.static_constants import H200
from sits_tvm.tuning.static_run import StaticRun
from sits_tvm.tuning.static_search import StaticSearch
from sits_tvm.tuning.tasks import Task
from sits_tvm.tuning.trials import TrialLog
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.records.database import read_records
from tir_schedules.records.workloads import MatmulWorkload

GPU = parse_target("cuda -arch=sm_90a")
RULE = TensorCoreMatmul()
HALF = MatmulWorkload("int4_matmul", 4096, 4096, 128, True, "float16", "float16")
INT8 = replace(HALF, family="int8_matmul", dtype="int8")
CHANNEL = replace(HALF, group_size=-1)
pytestmark = needs_nvcc


@cache
def task_of(workload, rows):
    ((bucket, space),) = RULE.spaces(RULE.prim_func(workload, rows), GPU).items()
    return Task(RULE, workload, bucket, space, GPU)


@cache
def compiled(workload, rows, **changed):
    """(candidate, its kernels)"""
    task = task_of(workload, rows)
    values = {**task.space.default_values, "wgmma": 1, **changed}
    work = RULE.work(task.func, GPU)(task.space.with_values(values))
    candidate = lower_candidate(task, values, work)
    return candidate, compile_kernels(candidate.source, "sm_90a", find_toolkit())


CASES = [(HALF, 32), (HALF, 1024), (INT8, 1024), (CHANNEL, 64)]


@pytest.mark.parametrize(("workload", "rows"), CASES, ids=str)
def test_work_is_that_of_machine_code(workload, rows):
    """Products, by shape and number; what decodes the weight, at least; and nothing of LDSM."""
    candidate, kernels = compiled(workload, rows)
    (kernel,) = [one for one in kernels if one.name == "main_kernel"]
    (product,) = {line.opcode for line in kernel.code if "GMMA" in line.family}
    work = candidate.work
    trips = trips_for(kernel.code, work.multiply_adds // multiply_adds(product))
    executed = opcode_counts(kernel.code, times_executed(kernel.code, trips))
    assert executed[product] == work.opcodes[product]
    assert all(executed[opcode] >= times for opcode, times in work.opcodes.items())
    assert sum(executed[opcode] for opcode in work.opcodes) < 1.1 * sum(work.opcodes.values())
    assert not any("LDSM" in opcode for opcode in executed)
    assert kernel.registers >= work.registers


def test_multiply_adds_are_those_of_the_product():
    """All warps of all blocks, with the tokens of whole tiles."""
    for workload, rows in CASES:
        candidate, _ = compiled(workload, rows)
        work, tokens = candidate.work, 8 * candidate.values["tokens"]
        padded = -(-rows // tokens) * tokens
        total = work.multiply_adds * work.blocks * work.threads // 32
        assert total == workload.n * workload.k * padded


@pytest.mark.parametrize(("workload", "rows"), CASES, ids=str)
def test_no_estimate_is_below_what_is_known_without_machine_code(workload, rows):
    candidate, _ = compiled(workload, rows)
    least, found = screen(candidate.work, H200), judge(candidate, H200, "sm_90a", find_toolkit())
    assert 0.7 * found.seconds < least <= found.seconds


def test_warpgroups_are_searched():
    search = StaticSearch(task_of(HALF, 1024), H200)
    found = [values for values in search.draw([], 10_000) if values["wgmma"]]
    assert {values["tokens"] for values in found} >= {8, 12, 16}
    assert {values["warps_n"] for values in found} == {4, 8, 12}
    assert any("wgmma takes 4 warps" in reason for reason in search.refused)
    assert not any("not counted" in reason for reason in search.refused)


def test_products_that_ptxas_makes_wait_are_rejected():
    candidate, kernels = compiled(CHANNEL, 64)
    waiting = [replace(kernel, waits=1) for kernel in kernels]
    assert reasons(candidate, kernels, H200) == []
    assert "waits for products of warpgroups" in reasons(candidate, waiting, H200)[0]


def test_tasks_of_many_rows_have_records(tmp_path):
    """A task whose default multiplies by warpgroups: two candidates."""
    task = task_of(replace(HALF, n=1024, k=1024), 1024)
    log = TrialLog(tmp_path / "trials.jsonl")
    args = "static", str(H200), 2, None, log, tmp_path / "database", lambda line: None
    StaticRun(*args, modelled=H200).all([task])
    (record,) = read_records(tmp_path / "database", "sm_90a").values()
    assert record.parameters["wgmma"] in (0, 1)
    assert record.seconds <= record.default_seconds
