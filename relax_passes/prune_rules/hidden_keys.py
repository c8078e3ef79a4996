"""Keys at either end that every query is kept from seeing."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx
from tvm.relax import op as R

from ..index_analysis.index_domain import Index, integer, is_integer
from .attention import ATTENTION, AttentionCall
from .empty_rows import no_row_is_empty
from .rule import Outcome, Rule, Scope, names, words


def _look(call: relax.Call, scope: Scope) -> Outcome | None:
    found = AttentionCall.of(call, scope)
    if found is None:
        return None
    (first, end), why = _seen(found)
    if is_integer(first, 0) and end.same_as(found.num_keys):
        return None
    seen = f"only {words(first)} ≤ j < {words(end)} of {words(found.num_keys)} keys can be seen"
    hidden = f"{seen}: {' and '.join(why)}"
    if not scope.prove(end - first >= 1):
        return Outcome(f"not removed: {hidden}; at least one has to stay")
    if found.attrs["empty_row"] == "uniform" and not no_row_is_empty(found):
        return Outcome(f"not removed: {hidden}; but a row that sees none is the mean of all")
    return Outcome(hidden, _sliced(found, first, end))


def _seen(call: AttentionCall) -> tuple[tuple[Index, Index], list[str]]:
    """The range of keys outside of which all are hidden, and by what."""
    first, end, why = integer(0), call.num_keys, []
    prove, oldest = call.scope.prove, call.offset - call.window + 1
    last = call.scope.dims.simplify(call.offset + call.num_queries)
    if call.is_causal and prove(last < call.num_keys):
        end, why = last, [f"causal offset {words(call.offset)}"]
    if call.window and prove(oldest > 0):
        first = call.scope.dims.simplify(oldest)
        why.append(f"window {call.window}")
    low, high = _columns(call)
    if low and prove(first < low):
        first, why = integer(low), [*why, f"bias {names([call.bias])}"]
    if high is not None and prove(end > high) and not _moves_the_corner(call):
        end, why = integer(high), [*why, f"bias {names([call.bias])}"]
    return (first, end), list(dict.fromkeys(why))


def _columns(call: AttentionCall) -> tuple[int, int | None]:
    """The first column of a constant bool bias that shows a key, and the one behind the last."""
    bias = None if call.bias is None else call.scope.constant(call.bias)
    if bias is None or bias.dtype != bool or bias.ndim == 0 or bias.shape[-1] < 2:
        return 0, None
    seen = np.flatnonzero(bias.reshape(-1, bias.shape[-1]).any(axis=0))
    return (int(seen[0]), int(seen[-1]) + 1) if seen.size else (0, None)


def _moves_the_corner(call: AttentionCall) -> bool:
    """Whether fewer keys would change an offset that no number can say."""
    return call.attrs["causal"] == "bottom_right" and not isinstance(call.offset, tirx.IntImm)


def _sliced(call: AttentionCall, first: Index, end: Index) -> relax.Call:
    changed = {name: _keys(call, getattr(call, name), 2, first, end) for name in ("k", "v")}
    if call.bias is not None and _has_keys(call.bias):
        changed["bias"] = _keys(call, call.bias, call.bias.ty.ndim - 1, first, end)
    causal, window = call.attrs["causal"], call.window
    is_corner = causal == "bottom_right" and end.same_as(call.num_keys)
    if causal is not None and not is_corner:
        causal = int(call.scope.dims.simplify(call.offset - first))
    elif causal is None and window:
        window += int(first)
    return call.replaced(causal=causal, window=window, **changed)


def _has_keys(bias: relax.Expr) -> bool:
    return bias.ty.ndim > 0 and not is_integer(bias.ty.shape[-1], 1)


def _keys(call: AttentionCall, x: relax.Expr, axis: int, first: Index, end: Index) -> relax.Expr:
    values = call.scope.constant(x) if axis == x.ty.ndim - 1 else None
    if values is not None and values.ndim == axis + 1:
        return relax.const(values[..., int(first) : int(end)], str(x.ty.dtype))
    return call.scope.emit(R.strided_slice(x, [axis], [first], [end], assume_inbound=True))


HIDDEN_KEYS_RULE = Rule("hidden-keys", ATTENTION, _look)
