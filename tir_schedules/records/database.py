"""The database of tuned parameters: a folder per architecture, a file per family, a record a line.

    database/znver4/int4_matmul.jsonl

It is read by `ApplyRecords`, written by `sits_tvm.tune`. One folder ships with this package; a
user's own has the same form.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tvm.target import Target

from sits_tvm.diagnostics import Diagnostic, SitsError

from .workloads import WORKLOADS, Workload

FORMAT = 3
SHIPPED = Path(__file__).parent.parent / "database"


@dataclass(frozen=True)
class Record:
    """The best parameters found for the rows of one bucket of a workload.

    `ranked` says how: "measured" on `device`, or "static", estimated for it from machine code by
    version `model` of the static model (None: measured). `seconds` are of these parameters, and
    `default_seconds` of the defaults (None: they failed): medians of calls with inputs out of
    cache, taken in the same minute; or, where ranked "static", lower bounds, which no device was
    asked about, of the largest number of rows (1024 where there is none). Parameters that are not
    named are the rule's own, all of them where the default is best. `ties` other candidates
    are too near to the best for the static model to tell. `cores` are threads, or multiprocessors.
    """

    workload: Workload
    rows: str
    parameters: dict[str, int]
    ranked: str
    device: str
    cores: int
    date: str
    tvm: str
    trials: int
    seconds: float
    default_seconds: float | None
    model: int | None = None
    ties: int = 0

    def to_json(self, arch: str) -> str:
        values = asdict(self)
        return json.dumps({"format": FORMAT, "arch": arch, **values.pop("workload"), **values})

    @classmethod
    def from_json(cls, text: str, arch: str) -> Record:
        """ValueError if `text` is no record of this format and architecture."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, dict) else values
            raise ValueError(f"format {found!r}, where this version reads {FORMAT}")
        if values.get("arch") != arch:
            raise ValueError(f"a record of {values.get('arch')!r} in the folder of {arch!r}")
        family = values.get("family")
        if family not in WORKLOADS:
            raise ValueError(f"family is {family!r}; there are {', '.join(WORKLOADS)}")
        kind = WORKLOADS[family]
        workload = kind(**{name: values.pop(name, None) for name in _types(kind)})
        del values["format"], values["arch"]
        record = cls(workload, **values)
        types, found = {**_types(kind), **_types(cls)}, {**vars(workload), **vars(record)}
        del types["workload"]
        for name, expected in types.items():
            names = expected.partition("[")[0].replace("None", "NoneType")
            if type(found[name]).__name__ not in names:
                raise ValueError(f"{name} is {found[name]!r}, which is no {expected}")
        return record


Records = dict[tuple[Workload, str], Record]
"""By workload and bucket."""


def arch_of(target: Target) -> str:
    """The folder of a target: "znver4", "sm_90"; "generic" for llvm without -mcpu."""
    name = "mcpu" if target.kind.name == "llvm" else "arch"
    return str(target.attrs.get(name, "generic"))


def read_records(database: Path, arch: str) -> Records:
    """The records of an architecture; none where the folder has none of it.

    Raises
    ------
    SitsError
        If a file holds anything but records of this format and architecture.
    """
    records: Records = {}
    for path in sorted((database / arch).glob("*.jsonl")):
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(f"{path}: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                record = Record.from_json(line, arch)
            except (ValueError, TypeError, RecursionError) as error:
                raise _unreadable(f"{path}, line {number}: {error}") from error
            records[record.workload, record.rows] = record
    return records


def write_records(database: Path, arch: str, records: Iterable[Record]) -> None:
    """Make `records` those of the architecture; a reader sees the old ones or all of the new."""
    folder = database / arch
    folder.mkdir(parents=True, exist_ok=True)
    families: dict[str, list[str]] = {}
    for record in records:
        families.setdefault(record.workload.family, []).append(record.to_json(arch) + "\n")
    for family, lines in families.items():
        new = folder / f".{family}.{os.getpid()}.new"
        new.write_text("".join(lines))
        os.replace(new, folder / f"{family}.jsonl")


def _types(cls: type) -> dict[str, Any]:
    """Field names with the names of their types."""
    return {field.name: str(field.type) for field in fields(cls)}


def _unreadable(message: str) -> SitsError:
    help_ = "tune again, or leave Config.database out"
    return SitsError([Diagnostic.error("database-unreadable", message, help=help_)])
