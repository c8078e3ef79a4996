"""`tune`: measure candidates for each INT4 kernel of a module, and keep the best in a database."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import tvm
from tvm.ir import IRModule
from tvm.target import Target

from sits_tvm.config import Config
from sits_tvm.diagnostics import Diagnostic, SitsError, raise_errors
from sits_tvm.driver import unscheduled
from sits_tvm.environment import cpu_name
from sits_tvm.frontends._packages import require
from sits_tvm.report_tables import render_table
from tir_schedules.cpu_target import cores
from tir_schedules.tuning_records import Record, arch_of, read_records, write_records

from .tasks import Task, find_tasks
from .trials import Trial, TrialLog, best, failures

_BATCH = 8
"""Candidates that are built, then run, between two looks at the clock."""

_FINALISTS, _ROUNDS = 3, 3
"""The best candidates are measured again with the default, in turns."""


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
    """Find parameters for the INT4 kernels of a module by measuring them.

    A kernel is tuned for each range of rows that it has code of its own for. Candidates come from
    MetaSchedule's evolutionary search, the default first; each is built in a process of its own,
    compared with the unscheduled function, and timed with weights out of cache. What was measured
    is kept in `work_dir`: a later call, also after this one was killed, goes on from there. An
    interrupt (Ctrl-C) ends the search as an exhausted budget does.

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
    from .measure import tracker  # TVM's tuning modules take a second to import

    if runner not in ("local", "rpc"):
        raise _error("runner", f"there is no runner {runner!r}", 'write "local" or "rpc"')
    if trials < 1:
        raise _error("trials", f"trials={trials} measures nothing", "write trials=64")
    device = cpu_name() if runner == "local" else f"{tracker().tracker_key} over RPC"
    lowered, checked = unscheduled(mod, target, params=params, config=config or Config())
    tasks = find_tasks(lowered, checked)
    if not tasks:
        help_ = "tune an INT4 build: config=Config(quant=QuantSpec()); CUDA kernels are not tuned"
        raise _error("nothing-to-tune", f"no kernel of {checked} has parameters", help_)
    work_dir = Path(work_dir)
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        log = TrialLog(work_dir / "trials.jsonl")
    except OSError as error:
        raise _error("work-dir", f"cannot write to {work_dir}: {error}", "") from error
    run = _Run(runner, device, trials, time_budget, log, work_dir / "database", progress)
    run.all(tasks)
    progress(run.table(tasks))
    run.raise_invalid(tasks)
    return run.database


@dataclass
class _Run:
    """One call of `tune`."""

    runner: str
    device: str
    trials: int
    time_budget: float | None
    log: TrialLog
    database: Path
    progress: Callable[[str], None]

    def all(self, tasks: Sequence[Task]) -> None:
        from .measure import make_builder

        start = time.monotonic()
        builder = cache(make_builder)  # takes seconds, which a finished run does not need
        with _until_interrupted(self.progress):
            for number, task in enumerate(tasks):
                deadline = None
                if self.time_budget is not None:  # what earlier tasks left over is shared out
                    now = time.monotonic()
                    left = self.time_budget - (now - start)
                    deadline = now + left / (len(tasks) - number)
                self._one(task, f"[{number + 1}/{len(tasks)}] {task}", deadline, builder)

    def _one(
        self, task: Task, name: str, deadline: float | None, builder: Callable[[], Any]
    ) -> None:
        from .measure import check_of, make_runner, measure
        from .search import Search

        known, start = self._known(task), time.monotonic()
        if _past(deadline) or (len(known) >= self.trials and self._record(task)):
            return
        search = Search(task, seed=1 + len(known))
        resumed = [search.at(trial.parameters) for trial in known]
        search.tell(resumed, [trial.seconds for trial in known])
        first = [search.at(task.space.default_values)]
        runner = make_runner(self.runner, check_of(task))
        while len(known) < self.trials and not _past(deadline):
            batch = [schedule for schedule in first if search.is_new(schedule)]
            batch += search.draw(min(_BATCH, self.trials - len(known)) - len(batch))
            first = []
            if not batch:
                break  # the space is exhausted
            found = measure(batch, task.target, builder(), runner)
            self.log.add(task.key(self.device), found)
            search.tell(batch, [trial.seconds for trial in found])
            known = self._known(task)
            self._keep(task, known, len(known))
            self.progress(f"{name}: {_state(task, known)}, {time.monotonic() - start:.0f} s")
        default, ranking = task.space.default_values, [t.parameters for t in best(known)]
        if ranking and ranking[0] != default:
            better = [values for values in ranking[:_FINALISTS] if values != default]
            finals = [search.at(values) for values in (default, *better)]
            final = measure(finals, task.target, builder(), runner, rounds=_ROUNDS)
            self._keep(task, final, len(known))

    def _known(self, task: Task) -> list[Trial]:
        return self.log.of(task.key(self.device))

    def _record(self, task: Task) -> Record | None:
        records = read_records(self.database, arch_of(task.target))
        return records.get((task.workload, task.bucket))

    def _keep(self, task: Task, measured: Sequence[Trial], count: int) -> None:
        """Write the best of what was `measured` of a task as its record."""
        ranking = best(measured)
        if not ranking:
            return
        arch = arch_of(task.target)
        records = read_records(self.database, arch)
        records[task.workload, task.bucket] = Record(
            workload=task.workload,
            rows=task.bucket,
            parameters=ranking[0].parameters,
            ranked="measured",
            device=self.device,
            cores=cores(task.target),
            date=date.today().isoformat(),
            tvm=str(tvm.__version__),
            trials=count,
            seconds=_seconds(ranking[0]),
            default_seconds=_default_seconds(task, measured),
        )
        write_records(self.database, arch, records.values())

    def table(self, tasks: Sequence[Task]) -> str:
        """What came of each task."""
        rows = []
        for task in tasks:
            known, record = self._known(task), self._record(task)
            times = ["", "", ""]
            if record is not None:
                times = [_us(record.default_seconds), _us(record.seconds), _gain(record)]
            rows.append([str(task.workload), task.bucket, str(len(known)), failures(known), *times])
        header = ["kernel", "rows", "trials", "failed", "default us", "best us", "gain"]
        return render_table(header, rows)

    def raise_invalid(self, tasks: Sequence[Task]) -> None:
        """A SitsError for tasks that were tried in vain, or if none was tried at all."""
        found = []
        for task in tasks:
            known = self._known(task)
            if known and not best(known):
                last = known[-1]
                message = (
                    f"{task}: none of {len(known)} candidates is valid: {failures(known)}; "
                    f"for example {last.failure}: {last.detail}"
                )
                found.append(Diagnostic.error("no-valid-candidate", message))
        if not found and not any(self._known(task) for task in tasks):
            message = "nothing was measured before the end of the time budget"
            found.append(Diagnostic.error("nothing-measured", message, help="give it more time"))
        raise_errors(found)


@contextmanager
def _until_interrupted(progress: Callable[[str], None]) -> Iterator[None]:
    """Leave the block quietly at Ctrl-C, which TVM's calls turn into a RuntimeError."""
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if in_main else None
    try:
        yield
    except (KeyboardInterrupt, RuntimeError) as error:
        if not interrupted and not isinstance(error, KeyboardInterrupt):
            raise
        progress("stopped; the database holds the best of what was measured")
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)


def _past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _seconds(trial: Trial) -> float:
    assert trial.seconds is not None
    return trial.seconds


def _default_seconds(task: Task, measured: Sequence[Trial]) -> float | None:
    default = task.space.default_values
    return next((trial.seconds for trial in measured if trial.parameters == default), None)


def _state(task: Task, known: Sequence[Trial]) -> str:
    """The line of progress of a task."""
    failed, ranking = failures(known), best(known)
    fastest = _us(_seconds(ranking[0])) if ranking else "none"
    default = _us(_default_seconds(task, known))
    text = f"{len(known)} trials, best {fastest} us, default {default} us"
    return f"{text}, failed: {failed}" if failed else text


def _us(seconds: float | None) -> str:
    return "failed" if seconds is None else f"{seconds * 1e6:.1f}"


def _gain(record: Record) -> str:
    return f"{record.default_seconds / record.seconds:.2f}x" if record.default_seconds else ""


def _error(code: str, message: str, help_: str) -> SitsError:
    return SitsError([Diagnostic.error(code, message, help=help_)])
