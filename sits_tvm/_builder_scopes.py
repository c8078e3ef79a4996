"""Scopes of `relax.BlockBuilder` for each thread: TVM has one stack of them for all.

A build that opened the scope of a function while another thread did ended in a bare AssertionError.
"""

import threading
from collections import UserList

from tvm.relax import BlockBuilder


class _Scopes(threading.local, UserList):
    """An empty list in every thread."""


def separate_scopes() -> None:
    """For every builder in this process, from now on; the calling thread keeps what is open."""
    if not isinstance(BlockBuilder._stack, _Scopes):
        scopes = _Scopes()
        scopes.extend(BlockBuilder._stack)
        BlockBuilder._stack = scopes
