"""The tasks of a call of `tune` for CUDA, ranked by the static model instead of measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..device_code import require_toolkit
from ..device_code.nvcc import Toolkit
from .run import Outcome, Run, is_past, state_of
from .search import Values
from .static_code import judge, lower_candidate
from .static_constants import H200, MODEL_VERSION, TIE, Device
from .static_search import StaticSearch
from .tasks import Task
from .trials import Trial, best

_COMPILERS = 2
"""Candidates that nvcc compiles at a time, each in a process of its own."""

_BATCH = 4


@dataclass
class StaticRun(Run):
    """As `Run`, for one modelled device; the same parameters always come out of it.

    `drawn` samples of MetaSchedule are looked at, None: as many as `StaticSearch` does by default.
    """

    modelled: Device = H200
    drawn: int | None = None
    tools: Toolkit = field(default_factory=require_toolkit)

    def _go_on(self, task: Task, name: str, deadline: float | None, known: list[Trial]) -> None:
        start = time.monotonic()
        search = StaticSearch(task, self.modelled, drawn=self.drawn)
        default = task.space.default_values
        refusal = search.work(default)
        if isinstance(refusal, str):  # others could not be compared with it
            self.log.add(task.key(self.device), [Trial(default, None, "no kernel", refusal)])
            return
        while len(known) < self.trials and not is_past(deadline):
            left = min(_BATCH, self.trials - len(known))
            batch = search.draw(known, left) if known else [default]
            if not batch:
                break  # no other candidate can be better
            self.log.add(task.key(self.device), self._judged(task, search, batch))
            known = self._known(task)
            self._keep(task, known, len(known))
            self.progress(f"{name}: {state_of(task, known)}, {time.monotonic() - start:.0f} s")

    def _judged(self, task: Task, search: StaticSearch, batch: Sequence[Values]) -> list[Trial]:
        """Trials of a batch; the next candidate is lowered while nvcc compiles others."""
        arch = str(task.target.attrs["arch"])
        trials = []
        with ThreadPoolExecutor(_COMPILERS) as pool:
            for values in batch:
                work = search.work(values)
                if isinstance(work, str):
                    trials.append(pool.submit(Trial, values, None, "no kernel", work))
                    continue
                candidate = lower_candidate(task, values, work)
                trials.append(pool.submit(judge, candidate, self.modelled, arch, self.tools))
        return [trial.result() for trial in trials]

    def _keep(self, task: Task, measured: Sequence[Trial], count: int) -> None:
        """The default, if it is as good as the best, as far as the model can tell."""
        near = ties(measured)
        if not near:
            return
        default = task.space.default_values
        chosen = next((trial for trial in near if trial.parameters == default), near[0])
        sms = self.modelled.sms
        found = Outcome("static", self.modelled.name, sms, count, MODEL_VERSION, len(near) - 1)
        self._write(task, chosen, measured, found)


def ties(trials: Sequence[Trial]) -> list[Trial]:
    """The best one, and those that the model cannot tell from it, in order."""
    ranking = best(trials)
    return [t for t in ranking if (t.seconds or 0) <= (1 + TIE) * (ranking[0].seconds or 0)]
