"""Read a ``.pt2`` program without running what is in it.

`torch.export.load` unpickles what `weights_only` refuses, and evaluates expressions of sizes as
Python. Here both are errors. Imports torch.
"""

from __future__ import annotations

import json
import pickle
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.export.pt2_archive import _package

from ._this_thread import in_this_thread

# The functions are replaced in modules that all threads share, one block at a time.
_LOCK = threading.RLock()
_MOST_BYTES_PER_BYTE = 100
"""Of a compressed entry."""

# Classes of sympy and what they take: words, in quotes or not, integers, operators. No attributes,
# no functions of Python.
_TOKEN = r"[A-Z][A-Za-z]*(?=\()|'\w+'|(?!_)\w+(?!\w*\s*\()|[-+*/%(),<>=!&|~ ]"
_EXPRESSION = re.compile(f"(?:{_TOKEN})*")


def load_pt2(path: Path) -> torch.export.ExportedProgram:
    """The program that `torch.export.save` wrote.

    Raises
    ------
    ValueError
        For Python objects other than tensors, and for what is no expression of sizes; what else is
        wrong, as torch raises it.
    """
    _check_entries(path)
    with _without_pickle():
        return torch.export.load(path)


@contextmanager
def _without_pickle() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError("it holds a pickled object, which reading it would run")

    with _LOCK:
        load, load_object = torch.load, torch._C._pickle_load_obj
        loads = in_this_thread(refuse, pickle.loads)

        def load_tensors(*args: Any, **options: Any) -> Any:
            return load(*args, **{**options, "weights_only": True})

        with (
            mock.patch.object(torch, "load", in_this_thread(load_tensors, load)),
            mock.patch.object(torch._C, "_pickle_load_obj", in_this_thread(refuse, load_object)),
            mock.patch.object(_package, "pickle", SimpleNamespace(loads=loads, dumps=pickle.dumps)),
        ):
            yield


def _check_entries(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.file_size > _MOST_BYTES_PER_BYTE * max(entry.compress_size, 1):
                raise ValueError(f"{entry.filename} has {entry.file_size} bytes when unpacked")
            if entry.filename.endswith(".json"):
                for text in _expressions(json.loads(archive.read(entry))):
                    if not _EXPRESSION.fullmatch(text):
                        raise ValueError(f"{text[:80]!r} is no expression of sizes")


def _expressions(value: Any) -> Iterator[str]:
    """Every string that torch gives to sympy, which evaluates it."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            if isinstance(found.get("expr_str"), str):
                yield found["expr_str"]
            pending.extend(found.values())
        elif isinstance(found, list):
            pending.extend(found)
