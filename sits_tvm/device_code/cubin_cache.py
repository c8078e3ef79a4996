"""Machine code that nvcc has made before, and what was counted in it, in a folder of the user's.

``$SITS_TVM_CACHE``, or ``sits_tvm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; an empty
``SITS_TVM_CACHE`` turns it off. A file is written at once, so that processes may share the folder,
and any may be deleted at any time.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

_MOST_FILES = 512
"""The oldest are deleted."""

Counts: TypeAlias = dict[str, list[dict[str, int]]]
"""By kernel, instructions by name: of all of it, and of its main loop."""


def cache_key(*parts: Any) -> str:
    """A digest of all that decides what is made."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_cubin(key: str) -> tuple[bytes, str] | None:
    """The cubin and the log of a key; None if they are not there, or cannot be read."""
    entry = _read(key)
    try:
        cubin, log = base64.b64decode(entry["cubin"], validate=True), str(entry["log"])
    except (ValueError, KeyError, TypeError):
        return None
    return (cubin, log) if hashlib.sha256(cubin).hexdigest() == entry.get("sha256") else None


def write_cubin(key: str, cubin: bytes, log: str) -> None:
    """Keep a cubin and its log. A folder that cannot be written to is no error."""
    entry = {
        "cubin": base64.b64encode(cubin).decode(),
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "log": log,
    }
    _write(key, entry)


def read_counts(key: str) -> Counts | None:
    """The counts of a key; None if they are not there, or cannot be read."""
    entry = _read(key)
    counts = entry.get("counts")
    return counts if counts is not None and cache_key(counts) == entry.get("sha256") else None


def write_counts(key: str, counts: Counts) -> None:
    """Keep counts, as `write_cubin` keeps cubins."""
    _write(key, {"counts": counts, "sha256": cache_key(counts)})


def _read(key: str) -> dict[str, Any]:
    """The file of a key; an empty one if it is not there, or cannot be read."""
    folder = _folder()
    if folder is None:
        return {}
    try:
        entry = json.loads((folder / f"{key}.json").read_text())
    except (OSError, ValueError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _write(key: str, entry: dict[str, Any]) -> None:
    folder = _folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as room:
            new = Path(room) / "new"
            new.write_text(json.dumps(entry))
            new.replace(folder / f"{key}.json")
        _delete_oldest(folder)


def _delete_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


def _folder() -> Path | None:
    given = os.environ.get("SITS_TVM_CACHE")
    if given is not None:
        return Path(given) if given else None
    with contextlib.suppress(RuntimeError):  # no home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sits_tvm"
    return None
