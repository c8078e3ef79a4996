"""The CUDA records that ship: there is one for each layer and range of rows, each has a kernel, and
a build of the layer takes it."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import tvm
from small_modules import one_function
from tvm import relax, tirx

import sits_tvm
from sits_tvm import Config, QuantSpec, parse_target
from sits_tvm.device_code import find_toolkit
from sits_tvm.tuning.static_code import compile_kernels, judge, lower_candidate
from sits_tvm.tuning.static_constants import MODEL_VERSION, TIE, device_of
from tests.benchmarks.shared_code import code_key
from tests.benchmarks.tune_shipped_cuda import ARCHS, run_of, tasks_of, workloads
from tir_schedules import RULES, ApplyRecords, tuned_by, tuned_rows
from tir_schedules.matmul_cuda.rule import _recognise
from tir_schedules.matmul_cuda.spaces import tile_fault
from tir_schedules.matmul_cuda.tile import Tile
from tir_schedules.records.database import SHIPPED, read_records

ROWS = (1, 4, 16, 64, 256, 1024, 4096)


@cache
def shipped(arch):
    return read_records(SHIPPED, arch)


@cache
def tasks(arch):
    return [task for workload in workloads() for task in tasks_of(workload, arch)]


def bucket_of(found, rows):
    """The one of a layer's tasks that serves so many rows."""
    return next(t for t in found if t.space.most is None or rows <= t.space.most).bucket


def missing(records, arch):
    """(workload, rows) without a record."""
    of = {}
    for task in tasks(arch):
        of.setdefault(task.workload, []).append(task)
    return [
        (workload, rows)
        for workload, found in of.items()
        for rows in ROWS
        if (workload, bucket_of(found, rows)) not in records
    ]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_layer_has_records_for_all_rows(arch):
    assert missing(shipped(arch), arch) == []
    (left_out, *_) = shipped(arch)
    others = {key: record for key, record in shipped(arch).items() if key != left_out}
    assert {workload for workload, _ in missing(others, arch)} <= {left_out[0]}
    assert len(others) == len(tasks(arch)) - 1


@pytest.mark.parametrize("arch", ARCHS)
def test_every_record_has_a_kernel_and_is_no_worse_than_the_default(arch):
    for task in tasks(arch):
        record = shipped(arch)[task.workload, task.bucket]
        _, operands = _recognise(task.func, task.target)
        tile = task.space.with_values(record.parameters)
        most = replace(operands, most=task.space.most)
        assert tile_fault(most, tile, task.target) is None
        assert not isinstance(task.rule.work(task.func, task.target)(tile), str)
        assert (record.ranked, record.model) == ("static", MODEL_VERSION)
        assert (record.device, record.cores) == (device_of(arch).name, device_of(arch).sms)
        if record.parameters:
            default = record.default_seconds
            assert default is None or (1 + TIE) * record.seconds < default
        else:
            assert record.seconds == record.default_seconds
        assert len(record.to_json(arch)) <= 1024


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_find_their_records(arch):
    """Each of all ranges of rows, where the number is known at run time only."""
    rule = tasks(arch)[0].rule
    funcs = {f"f{i}": rule.prim_func(workload, None) for i, workload in enumerate(workloads())}
    with parse_target(f"cuda -arch={arch}"):
        found = ApplyRecords(RULES)(tvm.IRModule(funcs))
    for func in found.functions.values():
        assert tuned_by(func) == ("static",)
        assert set(tuned_rows(func)) == {task.bucket for task in tasks(arch)}


def linear(n, k):
    types = [relax.TensorType(shape, "float16") for shape in ((tirx.Var("s", "int64"), k), (n, k))]
    return one_function(
        lambda bb, x, w: bb.emit(relax.op.matmul(x, relax.op.permute_dims(w))), *types, num_input=1
    )


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (640, 2048)])
def test_a_build_takes_them(n, k):
    config = Config(quant=QuantSpec())
    _, report = sits_tvm.lower(linear(n, k), "cuda -arch=sm_90", config=config)
    (kernel,) = [kernel for kernel in report.kernels if kernel.family == "TensorCoreMatmul"]
    assert (kernel.ranked, kernel.tuned_by) == ("tuned", ("static",))
    assert len(kernel.tuned_rows) == 7


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 4096), (28672, 8192), (2048, 640)])
def test_no_kernel_spills_that_serves_any_number_of_rows(arch, n, k):
    """Candidates were compiled for one number."""
    config = Config(quant=QuantSpec())
    ex = sits_tvm.build(linear(n, k), f"cuda -arch={arch}", config=config)
    kernels = [kernel for kernel in ex.report.kernels if kernel.registers is not None]
    assert len(kernels) >= 7
    assert [(kernel.name, kernel.spills) for kernel in kernels if kernel.spills] == []


def trials_of(task, values, run):
    """With code of another shape, and with that of the task's own."""
    work = task.rule.work(task.func, task.target)(task.space.with_values(values))
    arch = str(task.target.attrs["arch"])
    own = judge(lower_candidate(task, values, work), run.modelled, arch, run.tools)
    return run._trial(task, values, work), own


TILE = {"channels": 1, "tokens": 1, "warps_n": 1, "warps_m": 1, "warps_k": 2, "units": 4,
        "stages": 4, "split": 2, "wgmma": 0}  # fmt: skip
SHAPES = {
    "columns": ((1024, 16384), (1024, 16352)),
    "columns, by more than a unit": ((1024, 16384), (1024, 16192)),
    "channels": ((1024, 16384), (1016, 16384)),
    "steps": ((1024, 16384 + 1024), (1024, 16384 + 512)),
    "few steps": ((1024, 4096), (1024, 8192)),
}
"""Two (n, k) each, of which one part of the weight is whole, or long, in one alone."""


def key_and_opcodes(n, k):
    """Of a kernel of one row."""
    workload = replace(workloads()[0], n=n, k=k)
    task = next(t for t in tasks_of(workload, "sm_90") if t.bucket == "1")
    work = task.rule.work(task.func, task.target)(tile := Tile(**TILE))
    source = lower_candidate(task, TILE, work).source
    kernels = compile_kernels(source, "sm_90", find_toolkit())
    opcodes = [Counter(line.opcode for line in kernel.code) for kernel in kernels]
    return code_key(task, tile), opcodes


@pytest.mark.parametrize(
    "part", [pytest.param(p, marks=() if p == "columns" else pytest.mark.slow) for p in SHAPES]
)
def test_other_machine_code_has_another_key(part):
    (key, opcodes), (other_key, others) = (key_and_opcodes(n, k) for n, k in SHAPES[part])
    assert opcodes != others
    assert key != other_key


@pytest.mark.parametrize(
    ("arch", "rows"), [("sm_90", "1"), ("sm_90a", "65-256"), *(
        pytest.param(arch, rows, marks=pytest.mark.slow)
        for arch in ARCHS for rows in ("2-8", "9-16", "17-32", "33-64", "257+"))],
)  # fmt: skip
def test_code_of_another_shape_gives_the_same_estimate(tmp_path, arch, rows):
    """4096 x 4096 for the other layers of Llama 3, of the tile that is the default there."""
    first, *others = [
        task for task in tasks(arch) if task.bucket == rows and "int4" in task.workload.family
    ][:12]
    run = run_of(tmp_path, 1, arch)
    values = first.space.default_values
    run._trial(first, values, first.rule.work(first.func, first.target)(first.space.default))
    compiled = len(run.known)
    for task in others:
        space = task.space
        if space.default_values != values:
            continue
        shared, own = trials_of(task, values, run)
        assert shared.failure == own.failure, str(task)
        if own.seconds is not None:
            assert shared.seconds == pytest.approx(own.seconds, rel=0.03), str(task)
    assert len(run.known) <= compiled + 2


JUDGED = {("sm_90", 0, "1"), ("sm_80", 8, "9-16")}
"""Architecture, number of the layer and rows."""


def judged_anew():
    for arch in ARCHS:
        for layer in (0, 4, 5, 8, 12):
            for rows in ("1", "9-16", "65-256", "257+"):
                marks = () if (arch, layer, rows) in JUDGED else pytest.mark.slow
                yield pytest.param(arch, layer, rows, marks=marks)


@pytest.mark.parametrize(("arch", "layer", "rows"), judged_anew())
def test_records_hold_for_the_kernels_of_today(tmp_path, arch, layer, rows):
    """A change of the kernels that changes their estimates asks for a new ranking."""
    workload = workloads()[layer]
    (task,) = [t for t in tasks(arch) if (t.workload, t.bucket) == (workload, rows)]
    record, run = shipped(arch)[workload, rows], run_of(tmp_path, 1, arch)
    tile = task.space.with_values(record.parameters)
    work = task.rule.work(task.func, task.target)(tile)
    values = {**task.space.default_values, **record.parameters}
    own = judge(lower_candidate(task, values, work), run.modelled, arch, run.tools)
    assert own.seconds == pytest.approx(record.seconds, rel=0.03), own.detail
