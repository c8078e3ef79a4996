"""Values that are computed twice from the same: masks, rotary tables, keys and values."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax
from tvm.ir import Op
from tvm_ffi import StructuralKey

from .rule import names

NAME = "common-subexpressions"
_PREFIXES = ("relax.builtin.", "relax.call_", "relax.grad.", "relax.memory.", "relax.vm.")
_RANDOM = ("relax.invoke_pure_closure", "relax.nn.dropout")


class SharedValues:
    """The first variable of each value in a dataflow block, and those that it stands for.

    Calls of ops only. Left alone: dropout, and what may hide a random draw or an allocation.
    """

    def __init__(self) -> None:
        self._first: dict[StructuralKey, relax.Var] = {}
        self._others: dict[relax.Var, list[relax.Var]] = {}

    def find(self, value: relax.Expr) -> relax.Var | None:
        """The variable that holds `value` already."""
        return self._first.get(StructuralKey(value)) if _is_repeatable(value) else None

    def add(self, var: relax.Var, value: relax.Expr) -> None:
        if _is_repeatable(value):
            self._first.setdefault(StructuralKey(value), var)

    def note(self, first: relax.Var, other: relax.Var) -> None:
        self._others.setdefault(first, []).append(other)

    def reasons(self) -> Iterator[tuple[relax.Var, str]]:
        """What is shared, and for whom."""
        for first, others in self._others.items():
            yield first, f"the same op on the same arguments as {names(others)}: computed once"


def _is_repeatable(value: relax.Expr) -> bool:
    if isinstance(value, relax.TupleGetItem):
        return True
    if not (isinstance(value, relax.Call) and isinstance(value.op, Op)):
        return False
    name = value.op.name
    return name == "relax.call_tir" or not (name.startswith(_PREFIXES) or name in _RANDOM)
