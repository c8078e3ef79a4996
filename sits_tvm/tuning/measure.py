"""Build candidates, run them here or on a tracker's devices, and check what they compute.

The functions that TVM's builder and runner call run in processes of their own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.runtime import Module, Tensor
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.runner.utils import run_evaluator_common
from tvm.target import Target

import sits_tvm  # noqa: F401, first: see tir_schedules
from tir_schedules import RULES, scheduling_passes
from tir_schedules.records.space import rule_of, sampled, with_parameters
from tir_schedules.records.workloads import Workload

from ..diagnostics import Diagnostic, SitsError
from ..target import parse_target
from .search import values_of
from .tasks import Task
from .trials import Trial

_SECONDS = 60
"""For building one candidate, and for running one."""

_CALLS = ms.runner.EvaluatorConfig(
    number=1, repeat=20, min_repeat_ms=0, enable_cpu_cache_flush=True
)
_FLUSHED = 256 << 20
"""Bytes that are written between calls on a GPU: more than any L2 cache holds."""

_WRONG = "wrong result"


@dataclass(frozen=True)
class Check:
    """What the output for seeded inputs is to be at positions `at` of its first axis, within
    `limit`."""

    kind: str
    workload: Workload
    rows: int
    at: list[int]
    expected: np.ndarray
    limit: float


def check_of(task: Task) -> Check:
    """The check of a task's candidates: the unscheduled function of an excerpt, run here."""
    rows = task.space.rows
    inputs = task.rule.inputs(task.workload, rows, np.random.default_rng(0))
    excerpt = task.rule.excerpt(task.workload, rows, inputs)
    output = _empty(excerpt.func)
    mod = IRModule({"main": excerpt.func})
    kernel = tvm.compile(mod, parse_target("llvm -mcpu=native"))["main"]
    kernel(*map(tvm.runtime.tensor, excerpt.inputs), output)
    expected = output.numpy()
    rounding = ml_dtypes.finfo(expected.dtype).eps.astype("f8")
    rounding += 4 * np.sqrt(excerpt.terms) * np.finfo("f4").eps
    expected = expected.astype("float64")
    limit = float(rounding * np.abs(expected).max())
    return Check(task.rule.kind, task.workload, rows, excerpt.at, expected, limit)


def _empty(func: Any) -> Tensor:
    """The output of a function, filled with NaN."""
    ty = func.params[-1].ty
    return tvm.runtime.tensor(np.full([int(extent) for extent in ty.shape], np.nan, str(ty.dtype)))


def build_candidate(mod: IRModule, target: Target, _params: Any) -> Module:
    """`f_build` of a builder: what was sampled, scheduled and compiled as in a build."""
    func = with_parameters(mod["main"], sampled(mod["main"]))
    with target:
        scheduled = tvm.transform.Sequential(scheduling_passes(target))(IRModule({"main": func}))
        return tvm.tirx.build(scheduled, target=target)


def allocate(check: Check, *call: Any) -> list[list[Tensor]]:
    """`f_alloc_argument` of a runner: the inputs of the check, and an output of NaN."""
    *_, device, infos, _ = call
    rule = rule_of(RULES, check.workload.family, check.kind)
    inputs = rule.inputs(check.workload, check.rows, np.random.default_rng(0))
    _, dtype, shape = infos[-1]
    output = np.full([int(extent) for extent in shape], np.nan, str(dtype))
    return [[tvm.runtime.tensor(array, device) for array in (*inputs, output)]]


def evaluate(check: Check, *call: Any) -> list[float]:
    """`f_run_evaluator` of a runner: seconds, once the output is found right."""
    *_, module, device, config, (arguments,) = call
    module["main"](*arguments)
    found = arguments[-1].numpy()[check.at].astype("float64")
    difference = np.abs(found - check.expected).max()
    if not difference <= check.limit:
        raise ValueError(f"{_WRONG}: off by {difference:.3g}, {check.limit:.3g} is rounding")
    if check.kind != "llvm":
        return _timed_on_gpu(module, device, config, arguments)
    keep_off_workers()
    return run_evaluator_common(module, device, config, [arguments])


def _timed_on_gpu(
    module: Module, device: Any, config: ms.runner.EvaluatorConfig, arguments: list[Tensor]
) -> list[float]:
    """MetaSchedule flushes the caches of CPUs only, by addresses that a GPU's are not."""
    timer = module.time_evaluator(
        "main", device, config.number, config.repeat, cache_flush_bytes=_FLUSHED
    )
    return [float(seconds) for seconds in timer(*arguments).results]


def keep_off_workers() -> None:
    """Let this thread run only where TVM has pinned none of its workers.

    It works beside them, and TVM does not pin it: on a core with one of them both take twice as
    long. Does nothing where the system has no such affinities.
    """
    threads = Path("/proc/self/task")
    if not threads.is_dir():
        return
    cores = [os.sched_getaffinity(int(thread.name)) for thread in threads.iterdir()]
    pinned = {core for allowed in cores if len(allowed) == 1 for core in allowed}
    if free := os.sched_getaffinity(0) - pinned:
        os.sched_setaffinity(0, free)


def make_builder() -> ms.builder.LocalBuilder:
    return ms.builder.LocalBuilder(timeout_sec=_SECONDS, f_build=build_candidate)


def make_runner(kind: str, check: Check, threads: int) -> ms.runner.Runner:
    """A runner that checks candidates: "local", or "rpc" with the tracker of the environment."""
    functions = {
        "evaluator_config": _CALLS,
        "f_alloc_argument": partial(allocate, check),
        "f_run_evaluator": partial(evaluate, check),
    }
    if kind == "local":
        initializer = partial(use_threads, threads)
        return ms.runner.LocalRunner(timeout_sec=_SECONDS, initializer=initializer, **functions)
    config = tracker()
    servers = config.count_num_servers()
    return ms.runner.RPCRunner(config, max_workers=servers, **functions)


def use_threads(count: int) -> None:
    """Make TVM use so many in this process, before any run: by itself it takes half of the CPUs."""
    os.environ["TVM_NUM_THREADS"] = str(count)


def tracker() -> ms.runner.RPCConfig:
    """The tracker that the environment names.

    Raises
    ------
    SitsError
        If it names none, it does not answer, or it has no server of the key.
    """
    try:
        config = ms.runner.RPCConfig._normalized(ms.runner.RPCConfig(session_timeout_sec=_SECONDS))
        config.count_num_servers(allow_missing=False)
    except ValueError as error:
        help_ = "set TVM_TRACKER_HOST, TVM_TRACKER_PORT and TVM_TRACKER_KEY; start servers with "
        help_ += "python -m tvm.exec.rpc_server --tracker HOST:PORT --key KEY"
        raise SitsError([Diagnostic.error("rpc-tracker", str(error), help=help_)]) from error
    return config


def measure(
    schedules: Sequence[Schedule],
    target: Target,
    builder: ms.builder.LocalBuilder,
    runner: ms.runner.Runner,
    rounds: int = 1,
) -> list[Trial]:
    """Build candidates, and run them in turns; seconds are the median of all calls."""
    built = builder.build([ms.builder.BuilderInput(s.mod, target) for s in schedules])
    paths = [None if r.error_msg is not None else str(r.artifact_path) for r in built]
    times: list[list[float]] = [[] for _ in built]
    errors = [("build error", str(r.error_msg)) if r.error_msg is not None else None for r in built]
    for _ in range(rounds):
        running = [at for at, error in enumerate(errors) if error is None]
        inputs = [_runner_input(schedules[at], paths[at], target) for at in running]
        for at, future in zip(running, runner.run(inputs), strict=True):
            outcome = future.result()
            if outcome.error_msg is not None:
                errors[at] = "run error", str(outcome.error_msg)
            else:
                times[at] += [float(seconds) for seconds in outcome.run_secs]
    for path in filter(None, paths):
        shutil.rmtree(Path(path).parent, ignore_errors=True)
    return [
        Trial(values_of(schedule), float(np.median(seconds)))
        if error is None
        else Trial(values_of(schedule), None, *_failure(*error))
        for schedule, seconds, error in zip(schedules, times, errors, strict=True)
    ]


def _runner_input(schedule: Schedule, path: str | None, target: Target) -> ms.runner.RunnerInput:
    device = {"llvm": "cpu"}.get(target.kind.name, target.kind.name)
    arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, True)
    return ms.runner.RunnerInput(path, device, arguments)


def _failure(stage: str, message: str) -> tuple[str, str]:
    """Reason and detail of what a builder or runner said."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    for line in lines:
        if _WRONG in line:
            return _WRONG, line
    return "timeout" if "Timeout" in message else stage, lines[-1]
