"""What there is to tune in a module: a task per workload and range of rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.target import Target

import tir_schedules
from tir_schedules.records.database import arch_of
from tir_schedules.records.space import Space, TunableRule
from tir_schedules.records.workloads import Workload
from tir_schedules.sources import digest


@dataclass(frozen=True)
class Task:
    """The parameters of a rule's kernels for one workload, in one bucket of rows."""

    rule: TunableRule
    workload: Workload
    bucket: str
    space: Space
    target: Target

    def __str__(self) -> str:
        return f"{self.workload}, rows {self.bucket}"

    @property
    def func(self) -> tirx.PrimFunc:
        return self.rule.prim_func(self.workload, self.space.rows)

    def key(self, device: str) -> dict[str, Any]:
        """What a measurement is of, as JSON; kernels are told apart by their sources."""
        return {
            "arch": arch_of(self.target),
            "device": device,
            "kernels": digest(type(self.rule).__module__),
            "rows": self.bucket,
            **asdict(self.workload),
        }

    def takes(self, parameters: dict[str, Any]) -> bool:
        """Whether these are all parameters of the space, with values in it."""
        try:
            self.space.with_values(parameters)
        except ValueError:
            return False
        return parameters.keys() == self.space.choices.keys()

    def search_space(self) -> Schedule:
        schedule = self.rule.apply(self.func, self.target, True)
        assert schedule is not None
        return schedule


def find_tasks(mod: IRModule, target: Target) -> list[Task]:
    """The tasks of a module of PrimFuncs without schedules, each once, in order."""
    found: dict[tuple[Workload, str], Task] = {}
    for func in mod.functions.values():
        for rule in tir_schedules.RULES if isinstance(func, tirx.PrimFunc) else ():
            workload = rule.workload(func, target) if isinstance(rule, TunableRule) else None
            if workload is None:
                continue
            for bucket, space in rule.spaces(func, target).items():
                if space.choices:
                    found.setdefault(
                        (workload, bucket), Task(rule, workload, bucket, space, target)
                    )
            break
    return list(found.values())
