"""Ctrl-C while TVM calls Python."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def until_interrupted(progress: Callable[[str], None]) -> Iterator[None]:
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
