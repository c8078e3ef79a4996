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

_lock = threading.Lock()  # of what follows; threads parse beside one another
_blocks = 0  # that threads are in, all together
_slow = inspect.stack


class _Here(threading.local):
    """Blocks that the thread is in."""

    blocks = 0


_here = _Here()


def load_tensor_intrinsics() -> None:
    """Import `tvm.s_tir.tensor_intrin`, which dlight would import at its first matmul."""
    with quick_stack():
        importlib.import_module("tvm.s_tir.tensor_intrin")


@contextmanager
def quick_stack() -> Iterator[None]:
    """Inside the block `inspect.stack` does without the names of modules, in this thread.

    TVMScript that is parsed inside it means the same.
    """
    global _blocks, _slow
    with _lock:
        if not _blocks:
            _slow, inspect.stack = inspect.stack, _stack
        _blocks += 1
    _here.blocks += 1
    try:
        yield
    finally:
        _here.blocks -= 1
        with _lock:
            _blocks -= 1
            if not _blocks:
                inspect.stack = _slow


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    """As `inspect.stack`, in a block with one line of context at most."""
    if not _here.blocks:
        return _slow(context)[1:]
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
