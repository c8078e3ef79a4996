"""Time runs against each other: round by round, so that all see the same machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

PAUSE = 0.05
"""Seconds after which the threads of another runtime sleep instead of waiting in a loop."""


def alternate(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    peers: Collection[str] = (),
    once: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Seconds of each run in each round; each is run once before it is timed.

    Runs in `peers` are of other runtimes, whose threads go where they like and spin for a while
    after a run. Those in `once`, the slow ones, take part in the first round only and are NaN in
    others.
    """
    for name in runs.keys() - set(once):
        runs[name]()  # threads of every runtime start here, where no core is excluded
    seconds = {name: np.full(rounds, np.nan) for name in runs}
    for round_ in range(rounds):
        for name, run in runs.items():
            if name in once and round_:
                continue
            with contextlib.nullcontext() if name in peers else caller_on_first_core():
                if name not in once:
                    run()
                seconds[name][round_] = timed(run)
            if name in peers:
                time.sleep(PAUSE)
    return seconds


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextlib.contextmanager
def caller_on_first_core() -> Iterator[None]:
    """TVM pins its workers to the other cores, but not the thread that calls and works with them.

    Threads that start inside inherit the single core.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class OtherLoad:
    """The share of the machine that others used in a ``with``: other processes, and its host."""

    def __enter__(self) -> OtherLoad:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy, own = (b - a for a, b in zip(self._start, self._now(), strict=True))
        self.share = max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds: on the wall, and on all cores of anything and of this process."""
        user, nice, system, _, _, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        )
        ticks = user + nice + system + irq + softirq + steal
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()
