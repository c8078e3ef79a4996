"""The tasks of a call of `tune`, one after the other, and what comes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm

from tir_schedules.cpu_target import cores
from tir_schedules.cuda_target import multiprocessors
from tir_schedules.records.database import Record, arch_of, read_records, write_records

from ..diagnostics import Diagnostic, raise_errors
from ..report_tables import render_table
from . import measure
from .interrupts import until_interrupted
from .search import Search
from .tasks import Task
from .trials import Trial, TrialLog, best, failures

_BATCH = 8
"""Candidates that are built, then run, between two looks at the clock."""

_FINALISTS, _ROUNDS = 3, 3
"""The best candidates are measured again with the default, in turns."""


@dataclass(frozen=True)
class Outcome:
    """How a record was found; fields as in `Record`."""

    ranked: str
    device: str
    cores: int
    trials: int
    model: int | None = None
    ties: int = 0


@dataclass
class Run:
    """One call of `tune`."""

    runner: str
    device: str
    trials: int
    time_budget: float | None
    log: TrialLog
    database: Path
    progress: Callable[[str], None]

    def all(self, tasks: Sequence[Task]) -> None:
        start = time.monotonic()
        with until_interrupted(self.progress):
            for number, task in enumerate(tasks):
                deadline = None
                if self.time_budget is not None:  # what earlier tasks left over is shared out
                    now = time.monotonic()
                    left = self.time_budget - (now - start)
                    deadline = now + left / (len(tasks) - number)
                self._one(task, f"[{number + 1}/{len(tasks)}] {task}", deadline)

    @cached_property
    def _builder(self) -> Any:
        return measure.make_builder()  # takes seconds, which a finished run does not need

    def _one(self, task: Task, name: str, deadline: float | None) -> None:
        known = self._known(task)
        if is_past(deadline) or (len(known) >= self.trials and self._record(task)):
            return
        if not self._record(task):  # killed before it was written, or deleted
            self._keep(task, known, len(known))
        self._go_on(task, name, deadline, known)

    def _go_on(self, task: Task, name: str, deadline: float | None, known: list[Trial]) -> None:
        """Try candidates beside those that are known."""
        start = time.monotonic()
        search = Search(task, seed=1 + len(known))
        resumed = [search.at(trial.parameters) for trial in known]
        search.tell(resumed, [trial.seconds for trial in known])
        first = [search.at(task.space.default_values)]
        runner = measure.make_runner(self.runner, measure.check_of(task), _cores(task))
        while len(known) < self.trials and not is_past(deadline):
            batch = [schedule for schedule in first if search.see(schedule)]
            batch += search.draw(min(_BATCH, self.trials - len(known)) - len(batch))
            first = []
            if not batch:
                break  # the space is exhausted
            found = measure.measure(batch, task.target, self._builder, runner)
            self.log.add(task.key(self.device), found)
            search.tell(batch, [trial.seconds for trial in found])
            known = self._known(task)
            self._keep(task, known, len(known))
            self.progress(f"{name}: {state_of(task, known)}, {time.monotonic() - start:.0f} s")
        default, ranking = task.space.default_values, [t.parameters for t in best(known)]
        if ranking and ranking[0] != default:
            better = [values for values in ranking[:_FINALISTS] if values != default]
            finals = [search.at(values) for values in (default, *better)]
            final = measure.measure(finals, task.target, self._builder, runner, rounds=_ROUNDS)
            self._keep(task, final, len(known))

    def _known(self, task: Task) -> list[Trial]:
        """Those that the space still has: another version may have measured others."""
        return [t for t in self.log.of(task.key(self.device)) if task.takes(t.parameters)]

    def _record(self, task: Task) -> Record | None:
        records = read_records(self.database, arch_of(task.target))
        return records.get((task.workload, task.bucket))

    def _keep(self, task: Task, measured: Sequence[Trial], count: int) -> None:
        """Write the best of what was `measured` of a task as its record."""
        if ranking := best(measured):
            found = Outcome("measured", self.device, _cores(task), count)
            self._write(task, ranking[0], measured, found)

    def _write(self, task: Task, chosen: Trial, tried: Sequence[Trial], found: Outcome) -> None:
        """Write a trial of those `tried` as the record of a task."""
        arch = arch_of(task.target)
        records = read_records(self.database, arch)
        records[task.workload, task.bucket] = Record(
            workload=task.workload,
            rows=task.bucket,
            parameters=chosen.parameters,
            date=date.today().isoformat(),
            tvm=str(tvm.__version__),
            seconds=_seconds(chosen),
            default_seconds=default_seconds(task, tried),
            **vars(found),
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
                help_ = "build runs without: it takes the default, or reports why that fails"
                found.append(Diagnostic.error("no-valid-candidate", message, help=help_))
        if not found and not any(self._known(task) for task in tasks):
            message = "nothing was measured before the end of the time budget"
            found.append(Diagnostic.error("nothing-measured", message, help="give it more time"))
        raise_errors(found)


def is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _cores(task: Task) -> int:
    """Threads of an llvm target, multiprocessors of a GPU."""
    of = cores if task.target.kind.name == "llvm" else multiprocessors
    return of(task.target)


def _seconds(trial: Trial) -> float:
    assert trial.seconds is not None
    return trial.seconds


def default_seconds(task: Task, measured: Sequence[Trial]) -> float | None:
    default = task.space.default_values
    return next((trial.seconds for trial in measured if trial.parameters == default), None)


def state_of(task: Task, known: Sequence[Trial]) -> str:
    """The line of progress of a task."""
    failed, ranking = failures(known), best(known)
    fastest = _us(_seconds(ranking[0])) if ranking else "none"
    default = _us(default_seconds(task, known))
    text = f"{len(known)} trials, best {fastest} us, default {default} us"
    return f"{text}, failed: {failed}" if failed else text


def _us(seconds: float | None) -> str:
    return "failed" if seconds is None else f"{seconds * 1e6:.1f}"


def _gain(record: Record) -> str:
    gain = f"{record.default_seconds / record.seconds:.2f}x" if record.default_seconds else ""
    return f"{gain}, {record.ties} ties" if record.ties else gain
