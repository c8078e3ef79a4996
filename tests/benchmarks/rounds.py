"""Time runs against each other: round by round, so that all see the same machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

TVM_SPINS, PEERS_SPIN = 0.2, 0.05
"""Seconds for which threads keep a core busy after a run, waiting for the next."""


def alternate(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    peers: Collection[str] = (),
    once: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Seconds of each run in each round; each is run once before it is timed.

    Those in `peers` are of other runtimes, each with threads of its own: before and after them is a
    pause. Those in `once`, the slow ones, take part in the first round only and are NaN in others.
    """
    for name in runs.keys() - set(once):
        runs[name]()  # the threads of every runtime start here
    seconds = {name: np.full(rounds, np.nan) for name in runs}
    before = ""
    with pinned_threads():
        for round_ in range(rounds):
            for name, run in runs.items():
                if name in once and round_:
                    continue
                if name in peers or before in peers:
                    time.sleep(PEERS_SPIN if before in peers else TVM_SPINS)
                if name not in once:
                    run()
                seconds[name][round_] = timed(run)
                before = name
    return seconds


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextlib.contextmanager
def pinned_threads() -> Iterator[None]:
    """This thread, which calls and works, on the first core; all others on the other cores.

    Otherwise both may share a core: TVM pins its workers but not the caller, and where others keep
    the second core busy, workers of peers are not moved there. Threads that start inside inherit
    the core of the thread that starts them.
    """
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    first, *rest = sorted(os.sched_getaffinity(0))
    for thread in threads:
        _pin(thread, rest or {first})
    os.sched_setaffinity(0, {first})
    try:
        yield
    finally:
        for thread, cores in before.items():
            _pin(thread, cores)


def _pin(thread: int, cores: Collection[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended
        os.sched_setaffinity(thread, cores)


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
