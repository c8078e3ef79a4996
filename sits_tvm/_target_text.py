"""Read a target written as text: `cuda -arch=sm_90 -libs=cublas`, JSON, or a tag."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable
from typing import Any

from .diagnostics import Diagnostic, SitsError

# TVM publishes no types for its options. What is in neither list is read as an int where it is
# one, as a bool where it is written as one, and otherwise as text.
_TEXT = {"kind", "tag", "device", "model", "mcpu", "arch", "mtriple", "mfloat-abi", "mabi", "jit"}
_TEXT |= {"device_name", "driver_name", "host"}
_LISTS = {"keys", "libs", "mattr", "cl-opt"}
_BOOLS = {"true": True, "false": False}


def read_target_text(text: str, tags: set[str]) -> dict[str, Any]:
    """The dictionary that a target string stands for.

    Parameters
    ----------
    text : str
        ``KIND -option=value …`` (also ``--option=value`` and ``-option value``; lists are
        separated by commas, a lone ``-option`` is true), a JSON object, or a tag, which may be
        followed by options.
    tags : set of str
        The tags that exist.

    Raises
    ------
    SitsError
        On text of no such form, quoting the part that is not understood.
    """
    if text.lstrip().startswith("{"):
        return _read_json(text)
    words = _split(text)
    if not words or words[0].startswith("-"):
        raise _syntax(text, "it must start with a kind, such as llvm or cuda, or with a tag")
    is_tag = words[0] in tags or "/" in words[0]
    config: dict[str, Any] = {"tag" if is_tag else "kind": words[0]}
    for name, value in _options(text, words[1:]):
        if name in config:
            raise _syntax(text, f"-{name} is given twice")
        config[name] = _value(name, value)
    return config


def _read_json(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _syntax(text, f"it starts like JSON, but {error}") from None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise _syntax(text, str(error).lower()) from None


def _options(text: str, words: list[str]) -> list[tuple[str, str]]:
    options: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name:
            raise _syntax(text, f"{word!r} is no option; options are written -name=value")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
        options.append((name, value))
    return options


def _value(name: str, text: str) -> Any:
    if name in _LISTS:
        return [item for item in text.split(",") if item]
    if name in _TEXT:
        return text
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return int(text)
    return _BOOLS.get(text.lower(), text)


def _syntax(text: str, reason: str) -> SitsError:
    return SitsError(
        [
            Diagnostic.error(
                "target-syntax",
                f"the target {text!r} is not understood: {reason}",
                help='write it like "cuda -arch=sm_90", "llvm -mcpu=native", '
                '{"kind": "cuda", "arch": "sm_90"}, or a tag such as "nvidia/nvidia-h100"',
            )
        ]
    )


def near(word: str, known: Iterable[str]) -> str:
    """What to write instead of `word`: the nearest of `known`, or all of a short list."""
    names = sorted({str(name) for name in known})
    part = word.rpartition("/")[2]
    alike = [name for name in names if part and part in name]
    alike = alike or difflib.get_close_matches(word, names, cutoff=0.6)
    if alike:
        return f"did you mean {' or '.join(alike[:3])}?"
    return f"known: {', '.join(names[:50])}" + (", …" if len(names) > 50 else "")
