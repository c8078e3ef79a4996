"""Load files that may be damaged, in a process with little memory and time.

``python hostile_files.py READER FILE...`` prints a line of JSON per file: its path, and "" or the
first line of the error. `outcomes` starts it, and starts it again behind a file that ends it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MEMORY = 1 << 30
"""Bytes of address space that reading may take, beyond the imports."""
SECONDS = 20


def read_gguf(path: Path) -> None:
    from sits_tvm.frontends.gguf import load_gguf

    load_gguf(path)


def read_onnx(path: Path) -> None:
    import sits_tvm

    sits_tvm.from_onnx(path)


def read_directory(path: Path) -> None:
    import sits_tvm

    sits_tvm.from_pretrained(path)


def read_model(path: Path) -> None:
    """As the command line reads it, and what the command would tell of it."""
    import sits_tvm
    from sits_tvm.__main__ import _model

    mod, params = _model(path)
    sits_tvm.lower(mod, "llvm", params=params)


def read_executable(path: Path) -> None:
    import tvm
    from tvm import relax

    import sits_tvm

    relax.VirtualMachine(sits_tvm.load(path), tvm.cpu())


def read_database(path: Path) -> None:
    from tir_schedules.tuning_records import read_records

    read_records(path, "generic")


def read_trials(path: Path) -> None:
    from sits_tvm.tuning.trials import TrialLog

    TrialLog(path)


def mutants(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """`data` cut off, with bits flipped, bytes replaced, or a part repeated, at seeded places."""
    import random

    draw = random.Random(seed)
    for number in range(count):
        changed = bytearray(data)
        at = draw.randrange(len(data))
        match number % 5:
            case 0:
                del changed[at:]
            case 1:
                changed[at] ^= 1 << draw.randrange(8)
            case 2:
                changed[at : at + 8] = bytes([draw.choice((0, 255))]) * min(8, len(data) - at)
            case 3:
                changed[at:at] = data[at : at + draw.randrange(64)]
            case _:
                del changed[at : at + draw.randrange(1, 16)]
        yield bytes(changed)


def json_mutants(text: str, count: int, seed: int = 0) -> Iterator[str]:
    """`text` with one value, at a seeded place, replaced by a hostile one or by another of its."""
    import random

    draw = random.Random(seed)
    places = [*_places(json.loads(text))]
    others = [
        -1,
        0,
        1 << 40,
        1 << 70,
        None,
        [],
        {},
        "",
        "../x",
        1e300,
        float("nan"),
        True,
        [[]] * 9,
    ]
    for _ in range(count):
        whole = json.loads(text)
        *above, last = draw.choice(places)
        holder = whole
        for key in above:
            holder = holder[key]
        if draw.random() < 0.4:
            holder[last] = _at(whole, draw.choice(places))
        elif isinstance(holder[last], int) and draw.random() < 0.6:
            holder[last] += draw.choice((-3, -2, -1, 1, 2, 3))
        elif isinstance(holder, dict) and draw.random() < 0.2:
            del holder[last]
        else:
            holder[last] = draw.choice(others)
        try:
            yield json.dumps(whole)
        except ValueError:  # a value that now holds itself
            continue


def _places(value: Any, above: tuple = ()) -> Iterator[tuple]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in pairs:
        yield (*above, key)
        if isinstance(part, dict | list):
            yield from _places(part, (*above, key))


def _at(value: Any, place: tuple) -> Any:
    for key in place:
        value = value[key]
    return value


def outcomes(reader: str, paths: Sequence[Path]) -> dict[Path, str]:
    """What came of each file: "", the first line of the error, or "crash: …", "hang: …"."""
    found: dict[Path, str] = {}
    while len(found) < len(paths):
        left = [str(path) for path in paths if path not in found]
        command = [sys.executable, __file__, reader, *left]
        limit = SECONDS + len(left)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            output, ended = done.stdout, f"crash: {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired as error:
            output, ended = (error.stdout or b"").decode(), f"hang: over {limit} s"
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
        found |= {Path(path): text for path, text in rows}
        if len(rows) < len(left):
            found[Path(left[len(rows)])] = ended
    return found


def _main(reader: str, *paths: str) -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import sits_tvm

    read = globals()[f"read_{reader}"]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for path in paths:
        try:
            read(Path(path))
            found = ""
        except sits_tvm.SitsError as error:
            found = str(error).splitlines()[0]
        except Exception as error:  # told to the test, which fails for it
            found = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps([path, found]), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
