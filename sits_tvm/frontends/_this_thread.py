"""Functions of other packages, replaced for the thread that replaces them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any


def in_this_thread(new: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `new` in the thread that calls this, and `old` in every other."""
    owner = threading.get_ident()

    @wraps(old)
    def either(*args: Any, **options: Any) -> Any:
        return (new if threading.get_ident() == owner else old)(*args, **options)

    return either
