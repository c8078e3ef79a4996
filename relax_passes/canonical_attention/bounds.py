"""What a mask shows, as the causal offset and the window of `relax.sits.attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from ..index_analysis.index_domain import Domain, Index, integer, is_integer
from ..index_analysis.visibility import Visibility


@dataclass(frozen=True)
class Masking:
    """The attributes of the op, its bias, and what was proved from which binding."""

    causal: int | str | None = None
    window: int = 0
    empty_row: str = "nan"
    bias: relax.Expr | None = None
    proof: str = ""


def bounds_of(shown: Visibility, shape: Sequence[Index]) -> Masking | None:
    """`causal` and `window` of the bounds; None where the op has no such attributes."""
    queries, keys = shape[2:]
    domain = Domain()
    domain.note_shape(shape)
    upper, lower = shown.upper, shown.lower
    if upper is not None and domain.is_natural(upper - (keys - 1)):
        upper = None
    if lower is not None and domain.is_natural(-lower - (queries - 1)):
        lower = None
    causal = None if upper is None else _offset(domain.simplify(upper), keys - queries, domain)
    if upper is not None and causal is None:
        return None
    if lower is None:
        return Masking(causal=causal, proof=shown.proof)
    first = integer(0) if upper is None else upper
    window = domain.simplify(first + 1 - lower)
    if not is_integer(window) or int(window) < 1:
        return None
    return Masking(causal=causal, window=int(window), proof=shown.proof)


def _offset(upper: Index, last: Index, domain: Domain) -> int | str | None:
    if is_integer(upper):
        return int(upper)
    return "bottom_right" if domain.is_equal(upper, last) else None


def both(shown: Sequence[Visibility]) -> Visibility:
    """What all of them show."""
    upper = [v.upper for v in shown if v.upper is not None]
    lower = [v.lower for v in shown if v.lower is not None]
    return Visibility(
        _fold(tirx.min, upper),
        _fold(tirx.max, lower),
        tuple(tensor for v in shown for tensor in v.rest),
        "; ".join(dict.fromkeys(v.proof for v in shown if v.proof)),
    )


def _fold(op: Callable, bounds: Sequence[Index]) -> Index | None:
    if not bounds:
        return None
    result = bounds[0]
    for bound in bounds[1:]:
        result = op(result, bound)
    return tvm.sym.Analyzer().simplify(result)
