"""What a chain of ops that quantizes consists of: parameters, events, and why it is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax

CLIPS = ("clip", "minimum", "maximum")
MOVES = ("reshape", "expand_dims", "squeeze", "permute_dims")


class Refused(Exception):
    """A chain that is nearly affine quantization, and the condition that fails.

    Parameters
    ----------
    code : str
        Kebab-case name of the kind.
    message, help : str
        What was found; what to write instead.
    """

    def __init__(self, code: str, message: str, help: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.help = code, message, help


@dataclass(frozen=True)
class Parameter:
    """A scale or zero point.

    With `axis` it is a vector along that axis of x, or one number; otherwise it broadcasts to x, in
    `shape` if that is given.
    """

    expr: relax.Expr
    axis: int | None = None
    shape: list[Any] | None = None


@dataclass(frozen=True)
class Event:
    """One step between the division and the multiplication.

    `kind` is round, clip (with `lo`, `hi`), cast (with `dtype`), or add or subtract (with `zero`
    and the `dtype` that it is computed in).
    """

    kind: str
    dtype: str = ""
    lo: float = -np.inf
    hi: float = np.inf
    zero: Parameter | None = None


@dataclass
class Chain:
    """x / divisor, `events` and `words` (names of the ops) in reverse, times multiplier.

    `moved` is an op on the way that gives the codes another shape.
    """

    multiplier: Parameter
    x: relax.Expr | None = None
    divisor: Parameter | None = None
    events: list[Event] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    moved: str = ""

    @property
    def form(self) -> str:
        return ", ".join(reversed(self.words))

    @property
    def cuts_gradient(self) -> bool:
        """Whether a cast to an integer lies on the way: TVM's gradient of it is an integer."""
        return any(event.kind == "cast" and is_integer(event.dtype) for event in self.events)

    def note(self, word: str, *events: Event) -> None:
        self.words.append(word)
        self.events += events


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))
