"""Which keys a mask shows to which queries, proved from how the mask is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from tvm import relax, tirx
from tvm_ffi import StructuralKey, structural_equal

from .._tensors import Lookup, broadcast, shape_of
from .bands import NOTHING, Band, Bands
from .formulas import cases
from .index_domain import Domain, Index, integer, is_integer
from .index_values import IndexValues

__all__ = ["Lookup", "Visibility", "additive_visibility", "every_row_sees_a_key", "visibility"]
_NO_BOUND = "a mask of no known form, kept as a bias"


@dataclass(frozen=True)
class Visibility:
    """Over score positions (b, h, i, j): key j is visible to query i iff all of these hold.

    Attributes
    ----------
    upper : PrimExpr or None
        j ≤ i + upper. An integer expression in the shape's variables; None: no bound.
    lower : PrimExpr or None
        j ≥ i + lower.
    rest : tuple of relax.Expr
        Bool tensors that broadcast to (B, H, Sq, Sk), True where visible, of which nothing is
        proved. Variables of the function, or calls on them that are still to be emitted.
    proof : str
        What was proved, and from which binding.
    """

    upper: Index | None = None
    lower: Index | None = None
    rest: tuple[relax.Expr, ...] = ()
    proof: str = ""


def visibility(
    mask: relax.Expr, lookup: Lookup, shape: Sequence[Index], *, visible: bool = True
) -> Visibility:
    """Read a bool mask.

    Parameters
    ----------
    mask : relax.Expr
        Bool, broadcastable to `shape`.
    lookup : Callable[[relax.Var], relax.Expr or None]
        What a variable is bound to.
    shape : (B, H, Sq, Sk)
    visible : bool
        The value that stands for a visible key; False for a mask of hidden keys.

    Returns
    -------
    Visibility
        Equal to the mask at every position. What is not proved is in `rest`.
    """
    scores = _Scores(lookup, shape)
    formula = scores.value(mask)
    if formula is None or str(formula.ty) != "bool":
        return Visibility(rest=(_as_visible(mask, visible),), proof=_NO_BOUND)
    formula = formula if visible else scores.formulas.invert(formula)
    return scores.describe(formula, _as_visible(mask, visible))


def additive_visibility(
    mask: relax.Expr, lookup: Lookup, shape: Sequence[Index]
) -> tuple[Visibility, float] | None:
    """Read a float mask that is added to scores.

    Returns
    -------
    (Visibility, float) or None
        The keys at which the mask is 0, and the one negative value, in the mask's dtype, that it
        has at all others; None unless it provably has just these two values. A mask of zeros
        hides nothing and has the value 0.0.
    """
    scores = _Scores(lookup, shape)
    value = scores.value(mask)
    if value is None or not all(isinstance(case, tirx.FloatImm) for case in cases(value)):
        return None
    fills = {float(case.value) for case in cases(value)} - {0.0}
    if len(fills) > 1 or any(fill > 0 for fill in fills):
        return None
    is_zero = scores.formulas.apply(lambda x: tirx.IntImm("bool", float(x.value) == 0.0), value)
    zero = relax.const(0.0, str(mask.ty.dtype))
    shown = scores.describe(is_zero, relax.op.equal(mask, zero))
    return shown, fills.pop() if fills else 0.0


def every_row_sees_a_key(visibility: Visibility, shape: Sequence[Index]) -> bool:
    """Whether every query provably sees a key: max(0, i + lower) ≤ min(Sk - 1, i + upper)."""
    if visibility.rest:
        return False
    domain = Domain()
    domain.note_shape(shape)
    _, _, row = (domain.axis(name, dim) for name, dim in zip("bhi", shape[:3], strict=True))
    firsts, lasts = [integer(0)], [shape[3] - 1]
    if visibility.lower is not None:
        firsts.append(row + visibility.lower)
    if visibility.upper is not None:
        lasts.append(row + visibility.upper)
    return all(domain.is_natural(b - a) for a in firsts for b in lasts)


def _as_visible(mask: relax.Expr, visible: bool) -> relax.Expr:
    return mask if visible else relax.op.logical_not(mask)


class _Scores:
    """Values at a score position, and the function's tensors that hold them."""

    def __init__(self, lookup: Lookup, shape: Sequence[Index]) -> None:
        self.shape, self.domain = list(shape), Domain()
        self.domain.note_shape(shape)
        axes = [self.domain.axis(name, dim) for name, dim in zip("bhij", shape, strict=True)]
        self.axes = [self.domain.simplify(axis) for axis in axes]
        self.seen: dict[StructuralKey, relax.Var] = {}
        self.values = IndexValues(lookup, self.domain, self._note)
        self.formulas = self.values.formulas

    def value(self, mask: relax.Expr) -> Index | None:
        at = broadcast(mask, self.axes, self.shape, self.domain)
        return None if at is None else self.values.element(mask, at)

    def _note(self, expr: relax.Expr, at: Sequence[Index], value: Index) -> None:
        """Remember a tensor of truth values that broadcasts to the scores."""
        if not isinstance(expr, relax.Var) or str(value.ty) != "bool" or len(at) > len(self.axes):
            return
        dims, axes = shape_of(expr), self.axes[len(self.axes) - len(at) :]
        shape = self.shape[len(self.shape) - len(at) :]
        aligned = dims is not None and all(
            is_integer(dim, 1) or (self.domain.is_equal(dim, n) and structural_equal(index, axis))
            for dim, n, index, axis in zip(dims, shape, at, axes, strict=True)
        )
        if aligned:
            self.seen.setdefault(StructuralKey(value), expr)

    def describe(self, formula: Index, whole: relax.Expr) -> Visibility:
        """`formula` as bounds and tensors; `whole` is a tensor of all of it."""
        bands, rest = [], []
        for conjunct in _conjuncts(formula):
            band = Bands(self.domain, *self.axes[2:]).of(conjunct)
            if band is None:
                rest.append(self._tensor(conjunct, whole))
            else:
                bands.append((band, self._tensor(conjunct, whole)))
        unproved = (whole,) if any(x is whole for x in rest) else _distinct(rest)
        upper, lower = self._bounds([band for band, _ in bands])
        return Visibility(upper, lower, unproved, _proof(upper, lower, [x for _, x in bands]))

    def _tensor(self, formula: Index, whole: relax.Expr) -> relax.Expr:
        found = self.seen.get(StructuralKey(formula))
        if found is not None:
            return found
        contrary = self.seen.get(StructuralKey(self.formulas.invert(formula)))
        return whole if contrary is None else relax.op.logical_not(contrary)

    def _bounds(self, bands: list[Band]) -> tuple[Index | None, Index | None]:
        if NOTHING in bands:
            return self.domain.simplify(-self.shape[2]), None
        upper = [self.domain.expression(b.upper) for b in bands if b.upper is not None]
        lower = [self.domain.expression(b.lower) for b in bands if b.lower is not None]
        simplify = self.domain.simplify
        return (
            simplify(reduce(tirx.min, upper)) if upper else None,
            simplify(reduce(tirx.max, lower)) if lower else None,
        )


def _conjuncts(formula: Index) -> Iterator[Index]:
    if isinstance(formula, tirx.And):
        yield from _conjuncts(formula.a)
        yield from _conjuncts(formula.b)
    else:
        yield formula


def _distinct(exprs: list[relax.Expr]) -> tuple[relax.Expr, ...]:
    found: list[relax.Expr] = []
    for expr in exprs:
        if not any(structural_equal(expr, other) for other in found):
            found.append(expr)
    return tuple(found)


def _proof(upper: Index | None, lower: Index | None, sources: list[relax.Expr]) -> str:
    claims = [f"j ≤ i + ({upper})"] * (upper is not None)
    claims += [f"j ≥ i + ({lower})"] * (lower is not None)
    if not claims:
        return _NO_BOUND
    names = [f"`{x.name}`" if isinstance(x, relax.Var) else str(x) for x in _distinct(sources)]
    return f"{' and '.join(claims)}, from {', '.join(names)}"
