"""Which parameters to compile next: those of which the static model expects most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from tir_schedules.records.space import sampled
from tir_schedules.records.work import Work

from .search import Values
from .static_code import screen
from .static_constants import TIE, Device
from .tasks import Task
from .trials import Trial, best

_DRAWN = 1024
"""Samples of MetaSchedule that are looked at: for few rows, one in fifty has a kernel."""

_PARENTS = 2
"""The best candidates, of which those that differ in one parameter are looked at, too."""


class StaticSearch:
    """The candidates of a task for which there is a kernel, the most promising first.

    Those that cannot be faster than the best one by more than a tie are left out: what they take
    at least (`screen`) is known before they are compiled. `refused` counts why there was no kernel.
    """

    def __init__(self, task: Task, device: Device, seed: int = 1, drawn: int | None = None) -> None:
        self.task, self.device = task, device
        self.refused: Counter[str] = Counter()
        self._work = task.rule.work(task.func, task.target)
        self._least: dict[tuple[int, ...], float] = {}
        for values in self._samples(seed, _DRAWN if drawn is None else drawn):
            self._look_at(values)

    def draw(self, known: Sequence[Trial], count: int) -> list[Values]:
        """Candidates that are not `known`; fewer where no other can be better."""
        ranking = best(known)
        parents = [trial.parameters for trial in ranking[:_PARENTS]]
        for parent in parents or [self.task.space.default_values]:
            for values in self._neighbours(parent):
                self._look_at(values)
        limit = (ranking[0].seconds or 0.0) / (1 + TIE) if ranking else math.inf
        tried = {tuple(trial.parameters.values()) for trial in known}
        promising = {
            values: least
            for values, least in self._least.items()
            if least < limit and values not in tried
        }
        first = sorted(promising, key=lambda values: promising[values])[: max(count, 0)]
        return [dict(zip(self.task.space.choices, values, strict=True)) for values in first]

    def work(self, values: Values) -> Work | str:
        """What the kernels of these parameters do, or why there are none."""
        return self._work(self.task.space.with_values(values))

    def _look_at(self, values: Values) -> None:
        key = tuple(values.values())
        if key in self._least:
            return
        work = self.work(values)
        if isinstance(work, str):
            self.refused[work] += 1
            self._least[key] = math.inf
            return
        try:
            self._least[key] = screen(work, self.device)
        except ValueError as error:
            self.refused[str(error)] += 1
            self._least[key] = math.inf

    def _samples(self, seed: int, drawn: int) -> Iterator[Values]:
        trace = self.task.search_space().trace
        for number in range(drawn):
            schedule = Schedule(self.task.func, seed=seed * _DRAWN + number)
            Trace(trace.insts, {}).apply_to_schedule(schedule, remove_postproc=False)
            (values,) = sampled(schedule.mod["main"]).values()
            yield values

    def _neighbours(self, values: Values) -> Iterator[Values]:
        for field in self.task.space.choices:
            for value in self.task.space.values(field):
                yield {**values, field: value}
