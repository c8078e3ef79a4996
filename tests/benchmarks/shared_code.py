"""Ranks CUDA kernels of many shapes by machine code that is compiled once for each tile.

The extents of a product are constants in its code: they make the trips of its loop, and bounds. So
code of one shape serves another of which the same parts are whole, with the trips, blocks and bytes
of that one. `test_shipped_cuda` compares with code of the shape itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sits_tvm.device_code import Launch
from sits_tvm.diagnostics import SitsError
from sits_tvm.tuning.search import Values
from sits_tvm.tuning.static_code import (
    Candidate,
    MachineCode,
    compile_kernels,
    judge_code,
    lower_candidate,
)
from sits_tvm.tuning.static_run import StaticRun
from sits_tvm.tuning.static_search import StaticSearch
from sits_tvm.tuning.tasks import Task
from sits_tvm.tuning.trials import Trial
from tir_schedules.matmul_cuda.tile import CHANNELS, UNIT, Tile
from tir_schedules.records.work import Work

_UNROLLED = 16
"""Fewer stages than these may have code of their own."""

_VECTOR, _THREADS = 4, 128
"""Of the kernel that adds up parts along k: channels of a thread, and threads."""

_LEFT_OUT = "left out"
"""The failure of a candidate that there is no code of, after as many as are compiled."""

Code = tuple[list[MachineCode], dict[str, Launch]] | str
"""Kernels with their launches, or why nvcc refuses them."""


@dataclass
class SharedRun(StaticRun):
    """As `StaticRun`, with machine code by what it depends on.

    Of a task, the default and so many more candidates are `compiled`, the most promising first;
    and whatever else there is code of is judged.
    """

    known: dict[tuple[Any, ...], Code] = field(default_factory=dict)
    compiled: int = 1
    _fresh: Counter[str] = field(default_factory=Counter)

    def _judged(self, task: Task, search: StaticSearch, batch: Sequence[Values]) -> list[Trial]:
        return [self._trial(task, values, search.work(values)) for values in batch]

    def _keep(self, task: Task, measured: Sequence[Trial], count: int) -> None:
        judged = [trial for trial in measured if trial.failure != _LEFT_OUT]
        super()._keep(task, judged, len(judged))

    def _trial(self, task: Task, values: Values, work: Work | str) -> Trial:
        if isinstance(work, str):
            return Trial(values, None, "no kernel", work)
        code = self._code(task, values, work)
        if code is None:
            return Trial(values, None, _LEFT_OUT)
        if isinstance(code, str):
            return Trial(values, None, "build error", code)
        kernels, launches = code
        found = {name: _at(task, work, launch, name) for name, launch in launches.items()}
        return judge_code(Candidate(values, work, "", found), kernels, self.modelled)

    def _code(self, task: Task, values: Values, work: Work) -> Code | None:
        """None if enough was compiled for this task."""
        arch = code_arch(str(task.target.attrs["arch"]), values)
        key = (arch, *code_key(task, task.space.with_values(values)))
        if key not in self.known:
            if values != task.space.default_values:
                if self._fresh[str(task)] >= self.compiled:
                    return None
                self._fresh[str(task)] += 1
            candidate = lower_candidate(task, values, work)
            try:
                kernels = compile_kernels(candidate.source, arch, self.tools)
                self.known[key] = kernels, dict(candidate.launches)
            except SitsError as error:
                self.known[key] = error.diagnostics[0].message
        return self.known[key]


def code_arch(arch: str, values: Values) -> str:
    """sm_90 for sm_90a, but for products of warpgroups: the machine code is the same."""
    return "sm_90" if arch == "sm_90a" and not values["wgmma"] else arch


def code_key(task: Task, tile: Tile) -> tuple[Any, ...]:
    """What decides the code of a tile: kinds and rows, and which parts of the weight are whole."""
    kind = replace(task.workload, n=0, k=0)
    units = -(-task.workload.k // UNIT)
    steps = -(-units // tile.step_units)
    whole = (
        task.workload.n % (CHANNELS * tile.channel_tiles) == 0,
        task.workload.k % (UNIT * tile.step_units) == 0,
        steps % tile.split == 0,
        min(-(-steps // tile.split), _UNROLLED),
    )
    return kind, task.bucket, tile, whole


def _at(task: Task, work: Work, launch: Launch, name: str) -> Launch:
    """The launch of a kernel at the shape of a task."""
    blocks = work.blocks
    if name != "main_kernel":
        blocks = task.space.rows * -(-task.workload.n // (_VECTOR * _THREADS))
    return replace(launch, grid=(str(blocks),))
