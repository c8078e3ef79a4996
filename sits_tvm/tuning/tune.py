"""`tune`: try candidates for the kernels of a module, and keep the best in a database."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm.ir import IRModule
from tvm.target import Target

from ..config import Config
from ..device_code import require_toolkit
from ..device_code.nvcc import REMEDY
from ..diagnostics import Diagnostic, SitsError
from ..driver import unscheduled
from ..environment import cpu_name
from ..optional_packages import require
from ..target import parse_target, short_name
from .static_constants import Device, device_of
from .tasks import find_tasks
from .trials import TrialLog


def tune(
    mod: IRModule,
    target: str | dict[str, Any] | Target,
    *,
    params: Mapping[str, Any] | None = None,
    config: Config | None = None,
    runner: str = "local",
    trials: int = 64,
    time_budget: float | None = None,
    work_dir: str | Path,
    progress: Callable[[str], None] = print,
) -> Path:
    """Find parameters for the INT4 and attention kernels of a module.

    A kernel is tuned for each range of rows that it has code of its own for. Candidates come from
    MetaSchedule's evolutionary search, the default first; each is built in a process of its own,
    compared with the unscheduled function, and timed with its inputs out of cache. What was
    measured is kept in `work_dir`: a later call, also after this one was killed, goes on from
    there. An interrupt (Ctrl-C) ends the search as an exhausted budget does.

    For cuda targets without a GPU, ``runner="static"`` ranks by machine code: of a thousand
    candidates that MetaSchedule samples, and those near the best, the most promising are compiled
    by nvcc, rejected if they spill, and ordered by an estimate that is a lower bound, never a
    speed. Within a tenth it tells nothing: the default wins such a tie.

    Parameters
    ----------
    mod, target, params, config
        As for `build`.
    runner : str
        "local": this machine. "rpc": the devices of the tracker that TVM_TRACKER_HOST,
        TVM_TRACKER_PORT and TVM_TRACKER_KEY name, which the target must describe. "static": no
        device, for cuda targets; see above.
    trials : int
        Candidates per kernel and range of rows, those of earlier calls included.
    time_budget : float, optional
        Seconds for all of it; checked between batches of up to eight candidates.
    work_dir : path
        Made if it is not there.
    progress : callable
        Receives a line of text after each batch, and a table at the end.

    Returns
    -------
    Path
        A database for `Config.database`.

    Raises
    ------
    SitsError
        What `lower` would raise; for an option without sense, a missing package of the extra
        ``tune``, no device for the runner, a `work_dir` that cannot be written or whose trials are
        damaged; if there is nothing to tune, or nothing was measured within `time_budget`; if a
        kernel has no valid candidate, with the most frequent reason. The database holds the other
        kernels.
    """
    for package in ("psutil", "cloudpickle", "xgboost", "tornado"):
        require(package, "tuning", "tune")
    from .run import Run  # needs these packages
    from .static_run import StaticRun

    if runner not in ("local", "rpc", "static"):
        raise _error("runner", f"there is no runner {runner!r}", 'write "local", "rpc" or "static"')
    if type(trials) is not int or trials < 1:
        raise _error("trials", f"trials={trials!r} measures nothing", "write trials=64")
    if time_budget is not None and not _is_number(time_budget):
        message = f"time_budget={time_budget!r} is no number of seconds"
        raise _error("time-budget", message, "write time_budget=600, or None for no end")
    if not isinstance(work_dir, str | os.PathLike):
        message = f"work_dir={work_dir!r} is no path"
        raise _error("work-dir", message, 'write a folder, as work_dir="tuning"')
    device = _device(parse_target(target), runner)
    lowered, checked = unscheduled(mod, target, params=params, config=config or Config())
    tasks = find_tasks(lowered, checked)
    if not tasks:
        help_ = "products have, with config=Config(quant=QuantSpec()), and attention on llvm"
        message = f"no kernel for {short_name(checked)} has parameters"
        raise _error("nothing-to-tune", message, help_)
    work_dir = Path(work_dir)
    try:
        (work_dir / "database").mkdir(parents=True, exist_ok=True)
        log = TrialLog(work_dir / "trials.jsonl")
    except OSError as error:
        message = f"cannot write to {work_dir}: {error}"
        raise _error("work-dir", message, "give a folder, or a new name") from error
    common = runner, str(device), trials, time_budget, log, work_dir / "database", progress
    run = Run(*common) if isinstance(device, str) else StaticRun(*common, modelled=device)
    try:
        run.all(tasks)
    except OSError as error:
        message = f"cannot write to {work_dir}: {error}"
        raise _error("work-dir", message, "make room there: a later call goes on") from error
    progress(run.table(tasks))
    run.raise_invalid(tasks)
    return run.database


def _is_number(value: object) -> bool:
    """NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _device(target: Target, runner: str) -> str | Device:
    """The device that measures, or the one that is modelled; SitsError if there is none."""
    kind = target.kind.name
    if runner == "static":
        return _modelled(target)
    if runner == "rpc":
        from .measure import tracker

        return f"{tracker().tracker_key} over RPC"
    if kind == "llvm":
        return cpu_name()
    if not tvm.device(kind).exist:
        help_ = 'runner="static" ranks CUDA kernels without one, runner="rpc" on another machine'
        raise _error("no-gpu", f"no device of this machine runs kernels for {kind}", help_)
    return str(tvm.device(kind).device_name)


def _modelled(target: Target) -> Device:
    if target.kind.name != "cuda":
        message = f"the static model knows CUDA kernels, none for {target.kind.name}"
        help_ = 'write target="cuda -arch=sm_90", or runner="local" to measure on this machine'
        raise _error("runner", message, help_)
    if require_toolkit().nvdisasm is None:
        message = "nvdisasm was not found, which shows the static model what nvcc made"
        raise _error("nvdisasm-missing", message, REMEDY)
    try:
        return device_of(str(target.attrs["arch"]))
    except ValueError as error:
        help_ = 'runner="local" measures on a GPU of this machine'
        raise _error("no-static-model", str(error), help_) from error


def _error(code: str, message: str, help_: str) -> SitsError:
    return SitsError([Diagnostic.error(code, message, help=help_)])
