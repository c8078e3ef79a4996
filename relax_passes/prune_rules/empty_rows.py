"""What is done for queries that see no key, where there are none."""

from __future__ import annotations

from tvm import relax

from ..index_analysis.visibility import Visibility, every_row_sees_a_key
from .attention import ATTENTION, AttentionCall
from .rule import Outcome, Rule, Scope, names, words

NAME = "empty-rows"


def no_row_is_empty(found: AttentionCall) -> str:
    """The proof that every query sees a key; empty without one."""
    if found.bias is None:
        seen = f"every query sees at least one of {words(found.num_keys)} keys: {_masks(found)}"
        return seen if _masks_leave_a_key(found) else ""
    shown, prove = found.visible(), found.scope.prove
    if shown is not None and shown.any(axis=-1).all() and prove(found.num_keys >= 1):
        return f"every row of the constant bias {names([found.bias])} shows a key: {_masks(found)}"
    if found.is_causal or found.window:
        return ""
    bias = found.scope.visibility(found.bias, found.scores)
    if bias is None or not every_row_sees_a_key(bias, found.scores):
        return ""
    return f"every row of bias {names([found.bias])} shows a key: {bias.proof}"


def _masks_leave_a_key(found: AttentionCall) -> bool:
    """From the rows that there are, or from the bounds of the function's dimensions."""
    upper = found.offset if found.is_causal else None
    lower = found.offset - found.window + 1 if found.window else None
    if every_row_sees_a_key(Visibility(upper, lower), found.scores):
        return True
    prove, last = found.scope.prove, found.num_queries - 1
    return (
        prove(found.num_keys >= 1)
        and (upper is None or prove(upper >= 0))
        and (lower is None or prove(last + lower <= found.num_keys - 1))
    )


def _look(call: relax.Call, scope: Scope) -> Outcome | None:
    found = AttentionCall.of(call, scope)
    if found is None or found.attrs["empty_row"] == "nan":
        return None
    proof = no_row_is_empty(found)
    if proof:
        return Outcome(proof, found.replaced(empty_row="nan"))
    kept = f"empty_row={found.attrs['empty_row']} stays"
    if found.bias is not None:
        return Outcome(f"{kept}: bias {names([found.bias])} may hide all keys from a query")
    return Outcome(f"{kept}: a query may see none of {words(found.num_keys)} keys: {_masks(found)}")


def _masks(found: AttentionCall) -> str:
    causal = f"causal offset {words(found.offset)}" if found.is_causal else "no causal mask"
    return f"{causal}, window {found.window}" if found.window else causal


EMPTY_ROWS_RULE = Rule(NAME, ATTENTION, _look)
