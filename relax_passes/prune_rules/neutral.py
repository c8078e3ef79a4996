"""Operations that leave every element as it is, and masks that hide no key."""

from __future__ import annotations

import math

from tvm import relax
from tvm_ffi import structural_equal

from ..index_analysis.visibility import Visibility
from .attention import ATTENTION, AttentionCall
from .rule import Outcome, Rule, Scope, names, words

NAME = "neutral-operations"
_UNIT = {"relax.multiply": 1.0, "relax.divide": 1.0, "relax.add": 0.0, "relax.subtract": 0.0}


def _look_at_arithmetic(call: relax.Call, scope: Scope) -> Outcome | None:
    name, unit = call.op.name, _UNIT[call.op.name]
    if name == "relax.add" and "int" not in str(getattr(call.ty, "dtype", "")):
        return None  # -0.0 + 0.0 is +0.0, and so is -0.0 - (-0.0)
    sides = [(0, 1)] if name in ("relax.divide", "relax.subtract") else [(0, 1), (1, 0)]
    for kept, other in sides:
        x = call.args[kept]
        number = scope.number(call.args[other])
        if structural_equal(x.ty, call.ty) and number == unit and math.copysign(1.0, number) > 0.0:
            word = name.removeprefix("relax.")
            return Outcome(f"{word} of {names([x])} and {unit:g} is {names([x])}", x)
    return None


def _look_at_cast(call: relax.Call, _: Scope) -> Outcome | None:
    x = call.args[0]
    if not structural_equal(x.ty, call.ty):
        return None
    return Outcome(f"{names([x])} is {x.ty.dtype} already", x)


def _look_at_masks(call: relax.Call, scope: Scope) -> Outcome | None:
    found = AttentionCall.of(call, scope)
    if found is None:
        return None
    return _bias(found) or _window(found) or _causal(found)


def _bias(call: AttentionCall) -> Outcome | None:
    if call.bias is None:
        return None
    shown = call.scope.visibility(call.bias, call.scores)
    if shown is None or not _shows_all(shown, call):
        return None
    kind = "True" if str(call.bias.ty.dtype) == "bool" else "0"
    proof = "" if shown.upper is shown.lower is None else f": {shown.proof}"
    return Outcome(
        f"bias {names([call.bias])} is {kind} everywhere{proof}", call.replaced(bias=None)
    )


def _shows_all(shown: Visibility, call: AttentionCall) -> bool:
    prove = call.scope.prove
    if shown.rest:
        return False
    if shown.upper is not None and not prove(shown.upper >= call.num_keys - 1):
        return False
    return shown.lower is None or prove(shown.lower <= 1 - call.num_queries)


def _window(call: AttentionCall) -> Outcome | None:
    last = call.offset + call.num_queries - 1
    if call.window == 0 or not call.scope.prove(last < call.window):
        return None
    reason = f"a window of {call.window} hides no key from queries at positions up to {words(last)}"
    return Outcome(reason, call.replaced(window=0))


def _causal(call: AttentionCall) -> Outcome | None:
    """Without it the window counts from offset 0."""
    if not call.is_causal or not call.scope.prove(call.offset >= call.num_keys - 1):
        return None
    if call.window and not call.scope.prove(call.offset == 0):
        return None
    reason = f"a causal offset of {words(call.offset)} hides none of {words(call.num_keys)} keys"
    return Outcome(reason, call.replaced(causal=None))


NEUTRAL_RULES = (
    Rule(NAME, frozenset(_UNIT), _look_at_arithmetic),
    Rule(NAME, frozenset({"relax.astype"}), _look_at_cast),
    Rule(NAME, ATTENTION, _look_at_masks),
)
