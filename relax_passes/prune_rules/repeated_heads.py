"""Key and value heads that are repeated before attention, which reads each for its group anyway."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx
from tvm.relax import op as R

from relax_passes._tensors import shape_of
from relax_passes.index_analysis.index_domain import Index, integer
from relax_passes.prune_rules.attention import ATTENTION, AttentionCall
from relax_passes.prune_rules.rule import Outcome, Rule, Scope, names
from relax_passes.prune_rules.views import Chain

Unrepeated = tuple[relax.Expr, list[int]]  # a tensor and its permutation to (B, G, Sk, D)


def _look(call: relax.Call, scope: Scope) -> Outcome | None:
    found = AttentionCall.of(call, scope)
    if found is None:
        return None
    k, v = _fewer_heads(found.k, scope), _fewer_heads(found.v, scope)
    both = k.keys() & v.keys()
    if both:
        times = max(both)
        reason = f"head h of k and v is head h // {times} of {names([k[times][0], v[times][0]])}"
        tensors = {name: _permuted(scope, *x[times]) for name, x in (("k", k), ("v", v))}
        return Outcome(reason, found.replaced(**tensors))
    if k or v:
        shown = ", ".join(f"{n} by {sorted(x) or 1}" for n, x in (("k", k), ("v", v)))
        return Outcome(f"heads are repeated differently: {shown}")
    return None


def _fewer_heads(x: relax.Expr, scope: Scope) -> dict[int, Unrepeated]:
    """By how often its heads are repeated: the tensors (B, G, Sk, D) below `x`, in any order."""
    if not isinstance(x.ty.shape[1], tirx.IntImm) or not scope.call(x)[0]:
        return {}
    chain, found = Chain(x, scope), {}
    for source, at in chain.below:
        dims = shape_of(source)
        if dims is None or len(dims) != 4:
            continue
        for times in _repeats(int(chain.shape[1]), dims):
            order = _order(chain, times, dims, at)
            if order is not None:
                found[times] = source, order
    return found


def _repeats(heads: int, dims: Sequence[Index]) -> list[int]:
    counts = {int(n) for n in dims if isinstance(n, tirx.IntImm)}
    return [heads // n for n in counts if 0 < n < heads and heads % n == 0]


def _order(
    chain: Chain, times: int, dims: Sequence[Index], at: Sequence[Index]
) -> list[int] | None:
    batch, heads, keys, width = chain.shape
    b, h, j, d = chain.axes
    group = chain.domain.divide(h, integer(times))[0]
    extents = [batch, integer(int(heads) // times), keys, width]
    return chain.order(dims, at, [b, group, j, d], extents)


def _permuted(scope: Scope, x: relax.Expr, order: list[int]) -> relax.Expr:
    return x if order == sorted(order) else scope.emit(R.permute_dims(x, order))


REPEATED_HEADS_RULE = Rule("repeated-heads", ATTENTION, _look)
