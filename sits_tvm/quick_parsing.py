"""Load TVM's tensor intrinsics in a second instead of half a minute.

Every `@T.prim_func` calls `inspect.stack()`, which for every frame looks through every module that
is loaded. With PyTorch installed that is 2000 modules, and the first GPU schedule in a process
imports 496 such functions. TVM reads a frame, its line number and its line of source, no more.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Two threads that replaced the function at once would put each other's back.
_LOCK = threading.RLock()


def load_tensor_intrinsics() -> None:
    """Import `tvm.s_tir.tensor_intrin`, which dlight would import at its first matmul."""
    with quick_stack():
        importlib.import_module("tvm.s_tir.tensor_intrin")


@contextmanager
def quick_stack() -> Iterator[None]:
    """Inside the block `inspect.stack` does without the names of modules.

    TVMScript that is parsed inside it means the same. The function is replaced for all threads,
    one block at a time.
    """
    with _LOCK:
        slow = inspect.stack
        inspect.stack = _stack
        try:
            yield
        finally:
            inspect.stack = slow


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    """As `inspect.stack`, with one line of context at most."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, line = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(name, line) if context else ""
        lines = [source] if source else None
        index = 0 if source else None
        frames.append(inspect.FrameInfo(frame, name, line, frame.f_code.co_name, lines, index))
        frame = frame.f_back
    return frames
