"""What a rule of PruneRedundantAttention is, what it may ask, and what it answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.ir import GenericConst
from tvm.sym import Analyzer
from tvm_ffi import StructuralKey

from .._values import Values
from ..index_analysis.dim_bounds import bounded_analyzer
from ..index_analysis.index_domain import Index
from ..index_analysis.visibility import Visibility, additive_visibility, visibility


@dataclass(frozen=True)
class Outcome:
    """What a rule found at a call: the proof, or the condition that failed.

    Attributes
    ----------
    reason : str
    value : relax.Expr or None
        What stands for the call; None: it stays.
    """

    reason: str
    value: relax.Expr | None = None


class Scope(Values):
    """The bindings of a dataflow block up to the one that is looked at, as rewritten.

    Attributes
    ----------
    function : relax.Function
        The function before the pass, for the bounds of its symbolic dimensions.
    emit : Callable[[relax.Expr], relax.Expr]
        Emits an expression in front of the binding.
    """

    def __init__(self, function: relax.Function, emit: Callable[[relax.Expr], relax.Expr]) -> None:
        self.function, self.emit = function, emit
        self.bound: dict[relax.Var, relax.Expr] = {}
        self.dims: Analyzer = bounded_analyzer(function)
        self._visible: dict[tuple, Visibility | None] = {}

    def lookup(self, var: relax.Var) -> relax.Expr | None:
        return self.bound.get(var)

    def prove(self, condition: Index | bool) -> bool:
        """Whether a condition on dimensions holds for all that the function allows."""
        return condition if isinstance(condition, bool) else self.dims.can_prove(condition)

    def visibility(
        self, mask: relax.Expr, shape: Sequence[Index], *, visible: bool = True
    ) -> Visibility | None:
        """What a bool mask, or a float one that is added, shows of scores of `shape`.

        None for a float mask of other values than 0 and one below it.
        """
        key = (mask, visible, *map(StructuralKey, shape))
        if key not in self._visible:
            self._visible[key] = self._read(mask, shape, visible)
        return self._visible[key]

    def _read(self, mask: relax.Expr, shape: Sequence[Index], visible: bool) -> Visibility | None:
        if str(mask.ty.dtype) == "bool":
            return visibility(mask, self.lookup, shape, visible=visible)
        found = additive_visibility(mask, self.lookup, shape)
        return None if found is None else found[0]


@dataclass(frozen=True)
class Rule:
    """One exact rewrite.

    Attributes
    ----------
    name : str
        As in `Config.attention`.
    ops : frozenset of str
        The ops whose calls it looks at.
    look : (relax.Call, Scope) -> Outcome or None
        None: nothing to say.
    """

    name: str
    ops: frozenset[str]
    look: Callable[[relax.Call, Scope], Outcome | None]


def words(dim: Index | str) -> str:
    """A dimension, or a text with dimensions, without the type of numbers."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(dim))


def names(variables: Sequence[relax.Expr], most: int = 4) -> str:
    """Variables and other operands in words."""
    shown = [_name(operand) for operand in variables]
    rest = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {rest} more" if rest > 0 else "")


def _name(operand: relax.Expr) -> str:
    if isinstance(operand, relax.Var):
        return f"`{operand.name}`"
    return f"a constant of {operand.ty}" if isinstance(operand, GenericConst) else str(operand)
