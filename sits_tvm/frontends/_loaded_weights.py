"""Whether the weights of a file and those of the model made of it are the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..diagnostics import Diagnostic, SitsError, emit

# transformers then returns what it did not find, which `refuse_incomplete` lists.
REPORTING = {"output_loading_info": True, "ignore_mismatched_sizes": True}
_MAX_NAMES = 5


def refuse_incomplete(path: Path, loaded: dict[str, Any]) -> None:
    """Raise for weights that transformers did not find in the file and made up at random."""
    missing = [f"{name} is missing" for name in sorted(loaded["missing_keys"])]
    wrong = [f"{n} has shape {tuple(a)}, not {tuple(b)}" for n, a, b in loaded["mismatched_keys"]]
    if missing + wrong:
        found = [f"{path}: {problem}" for problem in missing + wrong]
        help_ = "download it again, all of it, with the config.json that belongs to it"
        raise SitsError([Diagnostic.error("weights-incomplete", f, help=help_) for f in found])


def warn_unused(path: Path, names: Sequence[str]) -> None:
    """Tell of tensors that the model has no place for: its results may lack what they stand for."""
    if names:
        more = len(names) - _MAX_NAMES
        listed = ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
        message = f"{path}: not read, as the model has none such: {listed}"
        help_ = "if they matter, write the model in torch and use from_torch"
        emit(Diagnostic.warning("weights-unused", message, help=help_))
