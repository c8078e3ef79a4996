"""Diagonal bands of a score matrix: from a formula of the place to bounds on column - row."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from .formulas import is_true
from .index_domain import Domain, Index, at_most
from .polynomials import Polynomial


@dataclass(frozen=True)
class Band:
    """row + lower ≤ column ≤ row + upper, None: no bound; or no place at all."""

    upper: Polynomial | None = None
    lower: Polynomial | None = None
    is_empty: bool = False


EVERYTHING, NOTHING = Band(), Band(is_empty=True)


class Bands:
    """Bands over two axes; bounds are polynomials in the shape's dimensions."""

    def __init__(self, domain: Domain, row: Index, column: Index) -> None:
        self.domain = domain
        self.row, self.column = row, column

    def of(self, formula: Index) -> Band | None:
        """The band of the places where `formula` holds; None if it is none, or not provably."""
        if isinstance(formula, tirx.IntImm):
            return EVERYTHING if is_true(formula) else NOTHING
        if isinstance(formula, tirx.And):
            return self._intersection(self.of(formula.a), self.of(formula.b))
        if isinstance(formula, tirx.Or):
            return self._union(self.of(formula.a), self.of(formula.b))
        if isinstance(formula, tirx.Select):
            return self._either_case(formula)
        if isinstance(formula, tirx.EQ) and str(formula.a.ty) != "bool":
            ends = [(formula.a, formula.b), (formula.b, formula.a)]
            return self._intersection(*(self._half_plane(*pair) for pair in ends))
        pairs = list(at_most(formula))
        return self._half_plane(*pairs[0]) if pairs else None

    def _either_case(self, formula: tirx.Select) -> Band | None:
        inside, outside = self.of(formula.condition), self.of(tirx_not(formula.condition))
        return self._union(
            self._intersection(inside, self.of(formula.true_value)),
            self._intersection(outside, self.of(formula.false_value)),
        )

    def _half_plane(self, smaller: Index, larger: Index) -> Band | None:
        """smaller ≤ larger, linear in row and column with opposite slopes.

        Of a single row (column), which is number 0, any slope will do.
        """
        slopes = self._slopes(self.domain.excess((smaller, larger)))
        if slopes is None:
            return None
        column, row, rest = slopes
        if self._is_single(self.row) and column:
            row = -column
        if self._is_single(self.column) and row:
            column = -row
        if column + row != 0 or column == 0:
            return None
        bound = _floor_divide(rest, abs(column))
        if bound is None or not self.domain.is_of_dimensions(bound):
            return None
        return Band(upper=bound) if column < 0 else Band(lower=-bound)

    def _slopes(self, p: Polynomial) -> tuple[int, int, Polynomial] | None:
        """(a, b, c) with p = a · column + b · row + c, a and b numbers."""
        found = []
        for axis in (self.column, self.row):
            ends = None if self._is_single(axis) else self.domain.slope(p, axis)
            if ends is None and not self._is_single(axis):
                return None
            slope, p = (Polynomial({}), p) if ends is None else ends
            if slope.value is None:
                return None
            found.append(slope.value)
        return found[0], found[1], p

    def _is_single(self, axis: Index) -> bool:
        return not self.domain.polynomial(axis).terms

    def _intersection(self, a: Band | None, b: Band | None) -> Band | None:
        if a is None or b is None:
            return NOTHING if NOTHING in (a, b) else None
        if a.is_empty or b.is_empty:
            return NOTHING
        try:
            return Band(self._tighter(a.upper, b.upper, 1), self._tighter(a.lower, b.lower, -1))
        except _Incomparable:
            return None

    def _union(self, a: Band | None, b: Band | None) -> Band | None:
        """Of two bands that overlap or touch."""
        if a is None or b is None:
            return EVERYTHING if EVERYTHING in (a, b) else None
        if a.is_empty or b.is_empty:
            return b if a.is_empty else a
        if not (self._touches(a, b) and self._touches(b, a)):
            return None
        try:
            return Band(self._wider(a.upper, b.upper, 1), self._wider(a.lower, b.lower, -1))
        except _Incomparable:
            return None

    def _touches(self, a: Band, b: Band) -> bool:
        """Whether b begins at the latest right behind the end of a."""
        if a.upper is None or b.lower is None:
            return True
        gap = a.upper - b.lower + Polynomial.constant(1)
        return self.domain.is_positive(gap, or_zero=True)

    def _tighter(self, a: Polynomial | None, b: Polynomial | None, sign: int) -> Polynomial | None:
        if a is None or b is None:
            return b if a is None else a
        return a if self._is_less(a, b, sign) else b

    def _wider(self, a: Polynomial | None, b: Polynomial | None, sign: int) -> Polynomial | None:
        if a is None or b is None:
            return None
        return b if self._is_less(a, b, sign) else a

    def _is_less(self, a: Polynomial, b: Polynomial, sign: int) -> bool:
        """sign · a ≤ sign · b; raises where neither order is proved."""
        difference = (b - a) * Polynomial.constant(sign)
        if self.domain.is_positive(difference, or_zero=True):
            return True
        if self.domain.is_positive(-difference, or_zero=True):
            return False
        raise _Incomparable


class _Incomparable(Exception):
    """Two bounds of which neither is proved to be the smaller."""


def tirx_not(condition: Index) -> Index:
    """The contrary, as an ordering where `condition` is one."""
    pairs = list(at_most(condition, holds=False))
    return pairs[0][0] <= pairs[0][1] if pairs else tirx.Not(condition)


def _floor_divide(p: Polynomial, divisor: int) -> Polynomial | None:
    if divisor == 1:
        return p
    return None if p.value is None else Polynomial.constant(p.value // divisor)
