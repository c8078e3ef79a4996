"""Optional packages: an error that says how to get one, instead of an ImportError."""

from __future__ import annotations

import importlib

from .diagnostics import Diagnostic, SitsError


def require(package: str, needed_by: str, extra: str) -> None:
    """Import `package`, or raise a SitsError that names the extra of sits_tvm that brings it."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        message = f"{needed_by} needs {package}: {error}"
        help = f"pip install 'sits_tvm[{extra}]'"
        raise SitsError([Diagnostic.error("package-missing", message, help=help)]) from error
