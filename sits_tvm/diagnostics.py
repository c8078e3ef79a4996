"""Diagnostics: what a pass found, where, and what to write instead.

Passes call `emit`; `sits_tvm.lower` collects what they emit with `collect` and raises one
`SitsError` with all of it after the pipeline (an exception raised inside a TVM pass would lose
its class and attributes on its way through the FFI).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

_LOG = logging.getLogger(__name__)
_SINK: ContextVar[list[Diagnostic] | None] = ContextVar("sits_tvm_diagnostics", default=None)


@dataclass(frozen=True)
class Diagnostic:
    """One finding.

    Attributes
    ----------
    severity : str
        "error", "warning" or "note".
    code : str
        Kebab-case name of the kind, such as "nothing-to-quantize".
    message : str
        What was found, with values.
    function, binding : str
        Where: the function, and the variable bound there ("" if the finding has no place).
    ir : str
        The binding as TVMScript, or "".
    help : str
        What to write instead; "" where a note or a warning asks for nothing.
    """

    severity: str
    code: str
    message: str
    function: str = ""
    binding: str = ""
    ir: str = ""
    help: str = ""

    @classmethod
    def error(
        cls,
        code: str,
        message: str,
        *,
        help: str,
        function: str = "",
        binding: str = "",
        ir: str = "",
    ) -> Diagnostic:
        """An error; it cannot do without `help`."""
        return cls("error", code, message, function, binding, ir, help)

    @classmethod
    def warning(cls, code: str, message: str, **where: str) -> Diagnostic:
        """A warning; `where` are `function`, `binding`, `ir` and `help`."""
        return cls("warning", code, message, **where)

    @classmethod
    def note(cls, code: str, message: str, **where: str) -> Diagnostic:
        """A note; `where` as for `warning`."""
        return cls("note", code, message, **where)

    def __str__(self) -> str:
        lines = [f"{self.severity}[{self.code}]: {self.message}"]
        if self.function:
            at = f", at `{self.binding}`" if self.binding else ""
            lines.append(f"  in function {self.function}{at}")
        lines += [f"      {line}" for line in self.ir.splitlines()]
        if self.help:
            lines.append(f"help: {self.help}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class SitsError(ValueError):
    """Raised with every error that a step found, not the first. It is a ValueError.

    Attributes
    ----------
    diagnostics : list of Diagnostic
        The errors alone, in the order they were found.
    """

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = list(diagnostics)
        super().__init__("\n\n".join(str(diagnostic) for diagnostic in self.diagnostics))


def emit(diagnostic: Diagnostic) -> None:
    """Report a finding to the enclosing `collect`, or to the log where there is none."""
    sink = _SINK.get()
    if sink is not None:
        sink.append(diagnostic)
    else:
        level = logging.INFO if diagnostic.severity == "note" else logging.WARNING
        _LOG.log(level, "%s", diagnostic)


@contextmanager
def collect() -> Iterator[list[Diagnostic]]:
    """Gather what is emitted inside the block."""
    found: list[Diagnostic] = []
    token = _SINK.set(found)
    try:
        yield found
    finally:
        _SINK.reset(token)


def raise_errors(diagnostics: Sequence[Diagnostic]) -> None:
    """Raise a `SitsError` if any of `diagnostics` is an error."""
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    if errors:
        raise SitsError(errors)
