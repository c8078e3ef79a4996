"""Attention whose scores are all equal: each query takes the mean of the keys that it sees."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op as R

from tir_schedules.tir_nodes import uses

from ..canonical_attention.graph import is_wider
from ..index_analysis.index_domain import Index
from .attention import ATTENTION, AttentionCall
from .rule import Outcome, Rule, Scope, names, words
from .views import Chain


def _look(call: relax.Call, scope: Scope) -> Outcome | None:
    found = AttentionCall.of(call, scope)
    proof = found and _equal_scores(found)
    if not found or not proof:
        return None
    fact = f"all weights of a row are equal, for finite scores: {proof}"
    if found.bias is not None or found.is_causal or found.window:
        return Outcome(f"{fact}; not rewritten: masks decide which keys are in the mean")
    if not scope.prove(found.num_keys >= 1):
        return Outcome(f"{fact}; not rewritten: {words(found.num_keys)} keys may be none")
    return Outcome(f"{fact}: the mean of {names([found.v])}", _mean(found))


def _equal_scores(call: AttentionCall) -> str:
    if call.attrs["scale"] == 0.0:
        return "the scale is 0"
    for x in (call.q, call.k):
        if call.scope.number(x) == 0.0:
            return f"{names([x])} is 0"
    if call.scope.call(call.k)[0]:
        chain = Chain(call.k, call.scope)
        for source, at in chain.below:
            if not any(uses(index, chain.axes[2]) for index in at):
                return f"all keys are equal, from {names([source])}"
    return ""


def _mean(call: AttentionCall) -> relax.Call:
    """Over the keys, in the dtype of the softmax, for every query."""
    emit, dtype, wide = call.scope.emit, str(call.v.ty.dtype), call.attrs["softmax_dtype"]
    batch, heads, queries, _ = call.scores
    width: Index = call.v.ty.shape[3]
    v = emit(R.astype(call.v, wide)) if is_wider(wide, dtype) else call.v
    mean = emit(R.mean(v, axis=2, keepdims=True))
    mean = emit(R.astype(mean, dtype)) if is_wider(wide, dtype) else mean
    times = int(heads) // int(call.v.ty.shape[1])
    mean = emit(R.repeat(mean, times, axis=1)) if times > 1 else mean
    return R.broadcast_to(mean, [batch, heads, queries, width])


UNIFORM_ROWS_RULE = Rule("uniform-rows", ATTENTION, _look)
