"""What was measured: a line of JSON per trial, in a file that survives being killed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..diagnostics import Diagnostic, SitsError


@dataclass(frozen=True)
class Trial:
    """A candidate: its seconds, or why it has none.

    `failure` is "", "build error", "run error", "timeout" or "wrong result"; `detail` tells more.
    """

    parameters: dict[str, int]
    seconds: float | None
    failure: str = ""
    detail: str = ""


class TrialLog:
    """The trials of a work_dir. A last line without an end, of a killed run, is dropped.

    Raises
    ------
    SitsError
        If another line is no trial.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._trials: list[tuple[dict[str, Any], Trial]] = []
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                self._trials.append((entry["key"], _checked(Trial(**entry["trial"]))))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                message = f"{path}, line {number}: no trial of a kernel ({error})"
                help_ = "take another work_dir, or delete the file"
                found = Diagnostic.error("trials-damaged", message, help=help_)
                raise SitsError([found]) from error

    def of(self, key: dict[str, Any]) -> list[Trial]:
        return [trial for other, trial in self._trials if other == key]

    def add(self, key: dict[str, Any], trials: Sequence[Trial]) -> None:
        self._trials += [(key, trial) for trial in trials]
        lines = [json.dumps({"key": key, "trial": asdict(trial)}) + "\n" for trial in trials]
        with self.path.open("a") as file:
            file.write("".join(lines))


def _checked(trial: Trial) -> Trial:
    """ValueError if a field has another type."""
    has_parameters = isinstance(trial.parameters, dict)
    seconds = trial.seconds
    has_time = seconds is None or (isinstance(seconds, int | float) and seconds > 0)
    if not (has_parameters and has_time and isinstance(trial.failure, str)):
        raise ValueError(f"found {trial}")
    return trial


def best(trials: Sequence[Trial]) -> list[Trial]:
    """Those with a time, the fastest first."""
    timed = [trial for trial in trials if trial.seconds is not None]
    return sorted(timed, key=lambda trial: trial.seconds or 0.0)


def failures(trials: Sequence[Trial]) -> str:
    """Their reasons with how often each was found, the most frequent first."""
    counts = Counter(trial.failure for trial in trials if trial.failure)
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
