"""`tune`: measure candidates for the kernels of a module, and keep the best in a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tvm.ir import IRModule
from tvm.target import Target

from sits_tvm.config import Config
from sits_tvm.diagnostics import Diagnostic, SitsError
from sits_tvm.driver import unscheduled
from sits_tvm.environment import cpu_name
from sits_tvm.frontends._packages import require

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
    """Find parameters for the INT4 and attention kernels of a module by measuring them.

    A kernel is tuned for each range of rows that it has code of its own for. Candidates come from
    MetaSchedule's evolutionary search, the default first; each is built in a process of its own,
    compared with the unscheduled function, and timed with its inputs out of cache. What was
    measured is kept in `work_dir`: a later call, also after this one was killed, goes on from
    there. An interrupt (Ctrl-C) ends the search as an exhausted budget does.

    Parameters
    ----------
    mod, target, params, config
        As for `build`.
    runner : str
        "local": this machine. "rpc": the devices of the tracker that TVM_TRACKER_HOST,
        TVM_TRACKER_PORT and TVM_TRACKER_KEY name, which the target must describe.
    trials : int
        Candidates per kernel and range of rows, those of earlier calls included.
    time_budget : float, optional
        Seconds for all of it; checked between batches of eight candidates.
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
        What `build` would raise; if there is nothing to tune; if a kernel has no valid candidate,
        with the most frequent reason. The database holds the other kernels.
    """
    for package in ("psutil", "cloudpickle", "xgboost", "tornado"):
        require(package, "tuning", "tune")
    from .measure import tracker  # needs these packages
    from .run import Run

    if runner not in ("local", "rpc"):
        raise _error("runner", f"there is no runner {runner!r}", 'write "local" or "rpc"')
    if trials < 1:
        raise _error("trials", f"trials={trials} measures nothing", "write trials=64")
    device = cpu_name() if runner == "local" else f"{tracker().tracker_key} over RPC"
    lowered, checked = unscheduled(mod, target, params=params, config=config or Config())
    tasks = find_tasks(lowered, checked)
    if not tasks:
        help_ = "for llvm, attention has, and products with config=Config(quant=QuantSpec())"
        raise _error("nothing-to-tune", f"no kernel of {checked} has parameters", help_)
    work_dir = Path(work_dir)
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        log = TrialLog(work_dir / "trials.jsonl")
    except OSError as error:
        raise _error("work-dir", f"cannot write to {work_dir}: {error}", "") from error
    run = Run(runner, device, trials, time_budget, log, work_dir / "database", progress)
    run.all(tasks)
    progress(run.table(tasks))
    run.raise_invalid(tasks)
    return run.database


def _error(code: str, message: str, help_: str) -> SitsError:
    return SitsError([Diagnostic.error(code, message, help=help_)])
