"""Which parameters to try next: MetaSchedule's evolutionary search, guided by boosted trees."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBConfig
from tvm.s_tir.schedule import Trace

from tir_schedules.records.space import ATTRIBUTE, sampled, with_parameters

from ..quick_parsing import load_tensor_intrinsics
from .tasks import Task

Values = dict[str, int]
"""Of the parameters of a task."""

_FAILED = ms.runner.RunnerResult(None, "failed")
_DRAWN = 8
"""Candidates that MetaSchedule chooses at a time."""

_FRUITLESS = 5
"""Draws without a new kernel after which the space counts as exhausted."""

_LOG = logging.getLogger(__name__)
_LOG.setLevel(logging.WARNING)  # MetaSchedule tells every step


class Search:
    """The candidates of a task, each kernel once, and what is known of them."""

    def __init__(self, task: Task, seed: int) -> None:
        load_tensor_intrinsics()  # TuneContext would, in minutes
        self.task = task
        self._space = task.search_space()
        self._seen: set[int] = set()
        self._waiting: list[Schedule] = []  # drawn, and not asked for yet
        self._database = ms.database.MemoryDatabase()
        self._model = ms.cost_model.XGBModel(
            extractor=_Features(), config=XGBConfig(nthread=1), num_warmup_samples=8
        )
        self._context = ms.TuneContext(
            task.func,
            target=task.target,
            space_generator=ms.space_generator.ScheduleFn(
                lambda _: task.search_space(), [], _checks(task), {_ChangeOne(seed): 1.0}
            ),
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=128, init_min_unmeasured=1
            ),
            logger=_LOG,
            rand_state=seed,
            num_threads=1,
        )
        self._workload = self._database.commit_workload(self._context.mod)
        self._context.pre_tuning(1 << 20, _DRAWN, None, self._database, self._model)

    def draw(self, count: int) -> list[Schedule]:
        """Candidates that were not drawn before; fewer where the space is exhausted."""
        fruitless = 0
        while len(self._waiting) < count and fruitless < _FRUITLESS:
            drawn = self._context.generate_measure_candidates() or []
            self._context.notify_runner_results(drawn, [_FAILED] * len(drawn))
            found = [candidate.sch for candidate in drawn if self.see(candidate.sch)]
            fruitless = 0 if found else fruitless + 1
            self._waiting += found
        drawn, self._waiting = self._waiting[:count], self._waiting[count:]
        return drawn

    def at(self, values: Values) -> Schedule:
        """The candidate of these parameters."""
        trace, space = self._space.trace, self.task.space
        samples = [inst for inst in trace.insts if inst.kind.name == "SampleCategorical"]
        decisions = {
            inst: space.values(field).index(values[field])
            for inst, field in zip(samples, space.choices, strict=True)
        }
        schedule = Schedule(self.task.func)
        Trace(trace.insts, decisions).apply_to_schedule(schedule, remove_postproc=False)
        return schedule

    def tell(self, schedules: Sequence[Schedule], seconds: Sequence[float | None]) -> None:
        """What was measured; None: a failure. These are not drawn again."""
        args = ms.arg_info.ArgInfo.from_entry_func(self._context.mod, True)
        candidates = [ms.MeasureCandidate(schedule, args) for schedule in schedules]
        results = [_FAILED if s is None else ms.runner.RunnerResult([s], None) for s in seconds]
        self._model.update(self._context, candidates, results)
        for schedule, time in zip(schedules, seconds, strict=True):
            self.see(schedule)
            if time is not None:
                self._database.commit_tuning_record(
                    ms.database.TuningRecord(
                        schedule.trace, self._workload, [time], self.task.target, args
                    )
                )

    def see(self, schedule: Schedule) -> bool:
        """Whether no candidate seen had this kernel, which other parameters may give as well."""
        task, func = self.task, schedule.mod["main"]
        scheduled = task.rule.apply(with_parameters(func, sampled(func)), task.target, False)
        assert scheduled is not None
        kernel = tvm_ffi.structural_hash(scheduled.mod["main"].without_attr(ATTRIBUTE))
        new = kernel not in self._seen
        self._seen.add(kernel)
        return new


def values_of(schedule: Schedule) -> Values:
    """The parameters that were sampled for the only bucket of a candidate."""
    (values,) = sampled(schedule.mod["main"]).values()
    return values


def _checks(task: Task) -> list[ms.Postproc]:
    """What drops samples that there is no kernel for: on GPUs that are most."""
    return [_HasKernel(task)] if task.rule.kind == "cuda" else []


@derived_object
class _HasKernel(ms.postproc.PyPostproc):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.work = task.rule.work(task.func, task.target)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, schedule: Schedule) -> bool:
        return not isinstance(self.work(self.task.space.with_values(values_of(schedule))), str)

    def clone(self) -> _HasKernel:
        return _HasKernel(self.task)


@derived_object
class _Features(ms.feature_extractor.PyFeatureExtractor):
    """The parameters themselves; those that MetaSchedule counts are equal for all candidates."""

    def extract_from(
        self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]
    ) -> list[tvm.runtime.Tensor]:
        rows = [list(values_of(candidate.sch).values()) for candidate in candidates]
        return [tvm.runtime.tensor(np.array([row], "float32")) for row in rows]


@derived_object
class _ChangeOne(ms.mutator.PyMutator):
    """Another value of one parameter. MetaSchedule's mutators know those of its own rules only."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, trace: Trace, _rand_state: Any = None) -> Trace:
        samples = list(trace.decisions)
        sample = self.random.choice(samples)
        return trace.with_decision(sample, self.random.randrange(len(sample.attrs[0])), True)

    def clone(self) -> _ChangeOne:
        return _ChangeOne(self.random.randrange(1 << 30))
