"""The rules at work on the values of a dataflow block, from first to last."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tvm import relax
from tvm_ffi import structural_equal

from .empty_rows import EMPTY_ROWS_RULE
from .guards import GUARD_RULE
from .hidden_keys import HIDDEN_KEYS_RULE
from .neutral import NEUTRAL_RULES
from .repeated_heads import REPEATED_HEADS_RULE
from .rule import Outcome, Rule, Scope, words
from .score_bound import SCORE_BOUND_RULE
from .shared import NAME as SHARED
from .shared import SharedValues
from .stabilisation import STABILISATION_RULE
from .uniform_rows import UNIFORM_ROWS_RULE
from .views import VIEW_RULE

RULES: tuple[Rule, ...] = (
    VIEW_RULE,
    REPEATED_HEADS_RULE,
    STABILISATION_RULE,
    *NEUTRAL_RULES,
    HIDDEN_KEYS_RULE,
    EMPTY_ROWS_RULE,
    GUARD_RULE,
    UNIFORM_ROWS_RULE,
    SCORE_BOUND_RULE,
)


def rules_by_op(names: Collection[str]) -> dict[str, list[Rule]]:
    found: dict[str, list[Rule]] = {}
    for rule in RULES:
        for op in rule.ops if rule.name in names else ():
            found.setdefault(op, []).append(rule)
    return found


@dataclass(frozen=True)
class Row:
    """What a rule found at `binding`."""

    binding: relax.Var
    rule: str
    changed: bool
    reason: str


class BlockRules:
    """One dataflow block; a value of another block is an argument to it.

    Attributes
    ----------
    binding : relax.Var
        The one whose value is looked at.
    rows : list of Row
    """

    def __init__(
        self, bb: relax.BlockBuilder, function: relax.Function, rules: Collection[str]
    ) -> None:
        self.bb, self.rules, self.shares = bb, rules_by_op(rules), SHARED in rules
        self.scope, self.shared = Scope(function, self._emit), SharedValues()
        self.found: list[Row] = []
        self.binding: relax.Var | None = None

    @property
    def rows(self) -> list[Row]:
        shared = [Row(var, SHARED, True, reason) for var, reason in self.shared.reasons()]
        return [*self.found, *shared]

    def define(self, var: relax.Var, value: relax.Expr) -> None:
        self.scope.bound[var] = value
        self.shared.add(var, value)

    def simplified(self, value: relax.Expr) -> relax.Expr:
        """`value` (normalized) by every rule, until none finds anything to do."""
        while isinstance(value, relax.Call):
            new = self._rewritten(value)
            if new is None:
                break
            value = new
        first = self.shared.find(value) if self.shares else None
        if first is None:
            return value
        self.shared.note(first, self.binding)
        return first

    def _rewritten(self, call: relax.Call) -> relax.Expr | None:
        kept = []
        for rule in self.rules.get(getattr(call.op, "name", ""), ()):
            found = self._checked(rule.look(call, self.scope), call)
            if found is None:
                continue
            row = Row(self.binding, rule.name, found.value is not None, words(found.reason))
            if found.value is not None:
                self.found.append(row)
                return found.value
            kept.append(row)
        self.found += kept
        return None

    def _checked(self, found: Outcome | None, call: relax.Call) -> Outcome | None:
        """A value has just the type of the call, dimension by dimension."""
        if found is None or found.value is None:
            return found
        value = self.bb.normalize(found.value)
        if structural_equal(value.ty, call.ty):
            return Outcome(found.reason, value)
        return Outcome(f"{found.reason}; but the type would be {value.ty}, not {call.ty}")

    def _emit(self, value: relax.Expr) -> relax.Expr:
        """A variable of `value`, simplified."""
        value = self.simplified(self.bb.normalize(value))
        if isinstance(value, relax.Var):
            return value
        var = self.bb.emit(value)
        self.define(var, value)
        return var
