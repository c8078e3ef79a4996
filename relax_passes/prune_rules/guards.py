"""What is done behind a softmax for rows that show no key, where every row shows one."""

from __future__ import annotations

import math

from tvm import relax

from .._tensors import resolve, shape_of
from ..canonical_attention.graph import is_wider
from ..index_analysis.index_domain import integer
from ..index_analysis.visibility import Visibility, every_row_sees_a_key
from .empty_rows import NAME
from .rule import Outcome, Rule, Scope, names, words
from .views import MOVES

_SAME_TRUTH = MOVES | {"relax.astype"}
_HIDDEN = {"equal": True, "not_equal": False}


def _look(call: relax.Call, scope: Scope) -> Outcome | None:
    """where(guard, 0, softmax(x)), or with the cases the other way round."""
    for case, other in ((1, 2), (2, 1)):
        weights = call.args[case]
        name, softmax = scope.call(weights)
        if name == "nn.softmax" and scope.number(call.args[other]) == 0.0:
            rows = MaskedRows(softmax, scope)
            if rows.value(call.args[0]) is not (case == 1):
                return None
            is_proved, reason = rows.every_row_shows_a_key()
            if not is_proved:
                return Outcome(f"the guard {names([call.args[0]])} stays: {reason}")
            return Outcome(f"every row shows a key, for finite scores: {reason}", weights)
    return None


class MaskedRows:
    """The rows of a softmax over the last axis, and tests of them."""

    def __init__(self, softmax: relax.Call, scope: Scope) -> None:
        self.softmax, self.scope, self.scores = softmax, scope, softmax.args[0]
        rank = self.scores.ty.ndim
        self.is_last = int(softmax.attrs.axis) % rank == rank - 1 and rank <= 4
        self.product, self.mask, self.hides = self._masked()

    def _masked(self) -> tuple[relax.Expr, relax.Expr | None, bool]:
        """What is masked, by what, and whether True hides a key."""
        name, call = self.scope.call(self.scores)
        if name == "where":
            for fill, product, hides in ((1, 2, True), (2, 1, False)):
                if self.scope.number(call.args[fill]) == -math.inf:
                    return call.args[product], call.args[0], hides
        if name == "add":
            for mask, product in ((1, 0), (0, 1)):
                if self._is_finite(call.args[product]):
                    return call.args[product], call.args[mask], False
        return self.scores, None, False

    def _is_finite(self, x: relax.Expr) -> bool:
        """Whether `x` is a scaled, capped product: finite where its operands are small enough."""
        while True:
            name, call = self.scope.call(x)
            if name == "matmul":
                return True
            if name in ("multiply", "divide"):
                number = self.scope.number(call.args[1])
                if number is None or not math.isfinite(number) or number == 0.0:
                    return False
            elif name == "astype":
                if not is_wider(str(x.ty.dtype), str(call.args[0].ty.dtype)):
                    return False
            elif name != "tanh" and f"relax.{name}" not in MOVES:
                return False
            x = call.args[0]

    def every_row_shows_a_key(self) -> tuple[bool, str]:
        """Whether that is proved, and from what; or why not."""
        dims = shape_of(self.scores)
        if dims is None or not self.is_last or not self._is_finite(self.product):
            return False, f"{names([self.product])} may be -inf itself"
        shape = [*[integer(1)] * (4 - len(dims)), *dims]
        if self.mask is None:
            has_keys = every_row_sees_a_key(Visibility(), shape)
            return has_keys, f"there is no mask over {words(shape[-1])} keys"
        shown = self.scope.visibility(self.mask, shape, visible=not self.hides)
        if shown is not None and every_row_sees_a_key(shown, shape):
            return True, shown.proof
        return False, f"mask {names([self.mask])} may hide all keys of a row"

    def value(self, condition: relax.Expr) -> bool | None:
        """What a condition is in each row that shows a key; None: it tests something else."""
        name, call = self.scope.call(condition)
        if f"relax.{name}" in _SAME_TRUTH:
            return self.value(call.args[0])
        if name == "logical_not":
            inner = self.value(call.args[0])
            return None if inner is None else not inner
        if name == "greater" and self.scope.number(call.args[1]) == 0.0:
            return self.value(call.args[0])
        if name == "isnan":
            below = resolve(call.args[0], self.scope.lookup)
            return False if below.same_as(self.softmax) else None
        if name in ("max", "min") and self._is_over_keys(call):
            hidden = self._is_hidden(call.args[0])
            is_known = hidden is not None and hidden == (name == "min")
            return not hidden if is_known else None
        return None

    def _is_over_keys(self, call: relax.Call) -> bool:
        axes = [int(i) % call.args[0].ty.ndim for i in call.attrs.axis or ()]
        return self.is_last and axes == [call.args[0].ty.ndim - 1]

    def _is_hidden(self, keys: relax.Expr) -> bool | None:
        """Whether a tensor is True where keys are hidden (False: where they are visible)."""
        name, call = self.scope.call(keys)
        if self.mask is not None and keys.same_as(self.mask) and str(keys.ty.dtype) == "bool":
            return self.hides
        if name == "logical_not":
            inner = self._is_hidden(call.args[0])
            return None if inner is None else not inner
        if name == "astype":
            return self._is_hidden(call.args[0])
        is_test = name in _HIDDEN and call.args[0].same_as(self.scores)
        if not is_test or self.scope.number(call.args[1]) != -math.inf:
            return None
        return _HIDDEN[name]


GUARD_RULE = Rule(NAME, frozenset({"relax.where"}), _look)
