"""A digest of the sources that a kernel is made by."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

_ROOT = Path(__file__).parent
_IMPORT = re.compile(r"^\s*from (\.+[\w.]+) import", re.MULTILINE)


@cache
def digest(module: str) -> str:
    """Of a module of this package ("tir_schedules.emit") and of all that it imports from it.

    What was measured or estimated of a kernel of other sources is not of this one.
    """
    found = hashlib.sha256()
    for name in sorted(_with_imports(module)):
        found.update(_source(name).encode())
    return found.hexdigest()[:12]


def _with_imports(module: str) -> set[str]:
    found, pending = set[str](), [module]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            package = name.rpartition(".")[0]
            pending += [resolve_name(other, package) for other in _IMPORT.findall(_source(name))]
    return found


def _source(module: str) -> str:
    _, *names = module.split(".")
    return _ROOT.joinpath(*names).with_suffix(".py").read_text(encoding="utf-8")
