"""Key and value heads that are repeated before attention, which reads each for its group anyway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import relax, tirx
from tvm.relax import op as R

from tir_schedules.tir_nodes import substitute

from .._tensors import shape_of
from ..index_analysis.index_domain import Index, integer
from .attention import ATTENTION, AttentionCall
from .rule import Outcome, Rule, Scope, names, words
from .views import Chain

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
    spread = [_spread(x, scope) for x in (found.k, found.v)]
    shown = "; ".join(f"head h of {n} is {x}" for n, x in zip("kv", spread, strict=True) if x)
    return Outcome(f"heads are repeated, but not in groups: {shown}") if shown else None


def _fewer_heads(x: relax.Expr, scope: Scope) -> dict[int, Unrepeated]:
    """By how often its heads are repeated: the tensors (B, G, Sk, D) below `x`, in any order."""
    found = {}
    for chain, source, dims, at in _below(x, scope):
        for times in _repeats(int(chain.shape[1]), dims):
            group = chain.domain.divide(chain.axes[1], integer(times))[0]
            order = _order(chain, times, dims, at, group)
            if order is not None:
                found[times] = source, order
    return found


def _spread(x: relax.Expr, scope: Scope) -> str:
    """Which head of a tensor with fewer heads a head h of `x` is, in words; "" if not known."""
    h = tirx.Var("h", "int64")
    for chain, source, dims, at in _below(x, scope):
        for times in _repeats(int(chain.shape[1]), dims):
            for head in at:
                if _order(chain, times, dims, at, head) is not None:
                    shown = substitute(head, {chain.axes[1]: h})
                    return f"head {words(shown)} of {names([source])}"
    name, call = scope.call(x)
    if name in ("concat", "stack") and int(call.attrs.axis or 0) in (1, -3):
        parts = getattr(scope.of(call.args[0]), "fields", ())
        if len(set(parts)) < len(parts):
            return f"in one of {names(list(dict.fromkeys(parts)))}"
    return ""


def _below(
    x: relax.Expr, scope: Scope
) -> Iterator[tuple[Chain, relax.Expr, list[Index], list[Index]]]:
    """The tensors of four axes below `x`: their dimensions, and the place where `x` is."""
    if isinstance(x.ty.shape[1], tirx.IntImm) and scope.call(x)[0]:
        chain = Chain(x, scope)
        for source, at in chain.below:
            dims = shape_of(source)
            if dims is not None and len(dims) == 4:
                yield chain, source, dims, at


def _repeats(heads: int, dims: Sequence[Index]) -> list[int]:
    counts = {int(n) for n in dims if isinstance(n, tirx.IntImm)}
    return [heads // n for n in counts if 0 < n < heads and heads % n == 0]


def _order(
    chain: Chain, times: int, dims: Sequence[Index], at: Sequence[Index], group: Index
) -> list[int] | None:
    """The permutation to (B, G, Sk, D) of a tensor whose head `group` is head h of the chain's."""
    batch, heads, keys, width = chain.shape
    b, _, j, d = chain.axes
    extents = [batch, integer(int(heads) // times), keys, width]
    return chain.order(dims, at, [b, group, j, d], extents)


def _permuted(scope: Scope, x: relax.Expr, order: list[int]) -> relax.Expr:
    return x if order == sorted(order) else scope.emit(R.permute_dims(x, order))


REPEATED_HEADS_RULE = Rule("repeated-heads", ATTENTION, _look)
