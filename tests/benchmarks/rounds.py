"""Time runs against each other: round by round, so that all see the same machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

SPINNING = 0.05
"""Seconds after which the threads of another runtime sleep instead of waiting in a loop."""


def alternate(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    once: Collection[str] = (),
    spinning: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Seconds of each run in each round; each is run once before it is timed.

    Runs in `once`, the slow ones, take part in the first round only and are NaN in others. Those in
    `spinning` are followed by a pause.
    """
    for name in runs.keys() - set(once):
        runs[name]()  # threads of every runtime start here, where no core is excluded
    seconds = {name: np.full(rounds, np.nan) for name in runs}
    with caller_on_first_core():
        for round_ in range(rounds):
            for name, run in runs.items():
                if name in once and round_:
                    continue
                if name not in once:
                    run()
                seconds[name][round_] = timed(run)
                if name in spinning:
                    time.sleep(SPINNING)
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
