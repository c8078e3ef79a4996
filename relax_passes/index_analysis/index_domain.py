"""What is known of index expressions: the ranges of axes, and what can be proved from them.

Exact for symbolic extents: an inequality of polynomials is proved at the ends of the axes' ranges
and at the least values of the dimensions; what is no polynomial goes to TVM's `Analyzer`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import tvm
from tvm import tirx
from tvm.ir import Range
from tvm.sym import Analyzer, ConstIntBound
from tvm.tirx.analysis import undefined_vars
from tvm_ffi import StructuralKey

from .polynomials import Polynomial

Index: TypeAlias = tvm.ir.Expr  # an integer or bool PrimExpr
ONE = Polynomial.constant(1)
_ARITHMETIC = {tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul}


def integer(value: int) -> tirx.IntImm:
    """
    Raises
    ------
    OverflowError
        Outside of int64.
    """
    if not -(1 << 63) <= value < 1 << 63:
        raise OverflowError(value)
    return tirx.IntImm("int64", value)


def is_integer(expr: object, value: int | None = None) -> bool:
    """Whether `expr` is an integer constant (of that value)."""
    return isinstance(expr, tirx.IntImm) and (value is None or int(expr) == value)


class Domain:
    """The points at which a tensor is looked at: axes 0 ≤ a < extent, dimensions ≥ 0.

    Claims are for all points, so they are vacuous where an extent is 0.
    """

    def __init__(self) -> None:
        self.analyzer = Analyzer()
        self._atoms: list[Index] = []
        self._numbers: dict[StructuralKey, int] = {}
        self._least: dict[int, int] = {}
        self._extents: dict[int, Polynomial] = {}
        self._assumed: list[Polynomial] = []
        self._scopes = 0

    def axis(self, name: str, extent: Index) -> tirx.Var:
        """A new variable in [0, extent)."""
        var = tirx.Var(name, "int64")
        self.analyzer.bind(var, Range(integer(0), extent))
        if isinstance(extent, tirx.Var):
            self.note_least(extent, 1)
        self._extents[self._number(var)] = self.polynomial(extent)
        return var

    def note_shape(self, shape: Iterable[Index]) -> None:
        """The dimensions of a tensor are not negative."""
        for dim in shape:
            if isinstance(dim, tirx.Var):
                self.note_least(dim, 0)

    def note_least(self, var: tirx.Var, least: int) -> None:
        number = self._number(var)
        if number in self._extents or self._least.get(number, least - 1) >= least:
            return
        self._least[number] = least
        self.analyzer.update(var, ConstIntBound(least, ConstIntBound.POS_INF), True)

    @contextmanager
    def assuming(self, condition: Index, holds: bool = True) -> Iterator[None]:
        """Points at which `condition` holds (or does not)."""
        known = [self.excess(c) for c in _comparisons(condition, holds)]
        scope = self.analyzer.constraint_scope(condition if holds else tirx.Not(condition))
        self._assumed += known
        self._scopes += 1
        try:
            with scope:
                yield
        finally:
            self._scopes -= 1
            del self._assumed[len(self._assumed) - len(known) :]

    @property
    def is_assuming(self) -> bool:
        return self._scopes > 0

    def excess(self, comparison: tuple[Index, Index]) -> Polynomial:
        """larger - smaller, of a pair (smaller, larger)."""
        smaller, larger = comparison
        return self.polynomial(larger) - self.polynomial(smaller)

    def polynomial(self, expr: Index) -> Polynomial:
        """`expr` in the unknowns of this domain; an axis of extent 1 is 0."""
        kind = type(expr)  # one look-up where isinstance would ask every class
        if kind is tirx.IntImm:
            return Polynomial.constant(int(expr))
        if kind in _ARITHMETIC:
            return _ARITHMETIC[kind](self.polynomial(expr.a), self.polynomial(expr.b))
        number = self._number(expr)
        extent = self._extents.get(number)
        return Polynomial({}) if extent and extent.value == 1 else Polynomial.unknown(number)

    def expression(self, polynomial: Polynomial) -> Index:
        result: Index = integer(0)
        for monomial, c in sorted(polynomial.terms.items(), key=lambda term: term[0] == ()):
            term: Index = integer(c)
            for number in monomial:
                term = self._atoms[number] * term
            result = result + term
        return self.analyzer.simplify(result)

    def simplify(self, expr: Index) -> Index:
        return self.expression(self.polynomial(self.analyzer.simplify(expr)))

    def is_equal(self, a: Index, b: Index) -> bool:
        difference = self.excess((a, b))
        return not difference.terms or self.is_zero(difference)

    def is_zero(self, p: Polynomial) -> bool:
        return self.is_positive(p, or_zero=True) and self.is_positive(-p, or_zero=True)

    def is_positive(self, p: Polynomial, or_zero: bool = False) -> bool:
        """Whether p > 0 (or ≥ 0) at every point. False: not proved."""
        p = p if or_zero else p - ONE
        if self._is_natural(p) or any(self._is_natural(p - q) for q in self._assumed):
            return True
        opaque = any(not isinstance(self._atoms[n], tirx.Var) for n in p.unknowns())
        return opaque and self.analyzer.can_prove(self.expression(p) >= 0)

    def slope(self, p: Polynomial, axis: Index) -> tuple[Polynomial, Polynomial] | None:
        """(a, b) with p = a · axis + b; None where p is not linear in it."""
        return p.slope(self._number(axis))

    def is_of_dimensions(self, p: Polynomial) -> bool:
        """Whether p depends on the dimensions of tensors alone."""
        return p.unknowns() <= self._least.keys()

    def is_bounded(self, p: Polynomial) -> bool:
        """Whether p depends on places and dimensions alone, each to the first power."""
        is_low = all(len(set(m)) == len(m) <= 2 for m in p.terms)
        return is_low and all(self._is_known(number) for number in p.unknowns())

    def _is_known(self, number: int) -> bool:
        if number in self._least or number in self._extents:
            return True
        atom = self._atoms[number]
        variables = [] if isinstance(atom, tirx.Var) else undefined_vars(atom, [])
        return bool(variables) and all(self._is_known(self._number(v)) for v in variables)

    def is_natural(self, expr: Index) -> bool:
        """Whether expr ≥ 0 at every point. False: not proved."""
        return self.is_positive(self.polynomial(expr), or_zero=True)

    def divide(self, expr: Index, divisor: Index) -> tuple[Index, Index]:
        """(expr // divisor, expr mod divisor), rounding down, for a divisor > 0."""
        p, d = self.polynomial(expr), self.polynomial(divisor)
        if not d.terms:
            return integer(0), integer(0)  # a dimension of 0: there are no points
        quotient, rest = p.divide(d)
        if self.is_positive(rest, or_zero=True) and self.is_positive(d - rest):
            return self.expression(quotient), self.expression(rest)
        rest_ = self.expression(rest)
        whole = self.expression(quotient) + tirx.floordiv(rest_, divisor)
        return self.simplify(whole), self.simplify(tirx.floormod(rest_, divisor))

    def _is_natural(self, p: Polynomial) -> bool:
        """p ≥ 0, from the ranges alone."""
        for number in reversed(self._extents):
            ends = p.slope(number)
            if ends is None:
                return False
            slope, at_zero = ends
            if not slope.terms or self._is_natural(slope):
                p = at_zero
            elif self._is_natural(-slope):
                p = at_zero + slope * (self._extents[number] - ONE)
            else:
                return False
        return self._is_natural_dimension(p)

    def _is_natural_dimension(self, p: Polynomial) -> bool:
        """No axis left: every unknown is its least value plus something natural."""
        for number in p.unknowns():
            least = self._least_of(number)
            if least is None:
                return False
            p = p.replace(number, Polynomial.unknown(number) + Polynomial.constant(least))
        return all(c >= 0 for c in p.terms.values())

    def _least_of(self, number: int) -> int | None:
        if number in self._least:
            return self._least[number]
        atom = self._atoms[number]
        if isinstance(atom, tirx.Var):
            return None
        bound = int(self.analyzer.const_int_bound(atom).min_value)
        return bound if bound > int(ConstIntBound.NEG_INF) else None

    def _number(self, atom: Index) -> int:
        key = StructuralKey(atom)
        if key not in self._numbers:
            self._numbers[key] = len(self._atoms)
            self._atoms.append(atom)
        return self._numbers[key]


def _comparisons(condition: Index, holds: bool) -> Iterator[tuple[Index, Index]]:
    """Pairs (smaller, larger) that follow from a condition, or from its contrary."""
    if isinstance(condition, tirx.Not):
        yield from _comparisons(condition.a, not holds)
    elif isinstance(condition, tirx.And) and holds:
        yield from _comparisons(condition.a, True)
        yield from _comparisons(condition.b, True)
    elif isinstance(condition, tirx.Or) and not holds:
        yield from _comparisons(condition.a, False)
        yield from _comparisons(condition.b, False)
    elif isinstance(condition, tirx.EQ) and holds:
        yield from ((condition.a, condition.b), (condition.b, condition.a))
    else:
        yield from at_most(condition, holds)


def at_most(condition: Index, holds: bool = True) -> Iterator[tuple[Index, Index]]:
    """The pair (a, b) of an ordering that says a ≤ b on integers; none for anything else."""
    if isinstance(condition, tirx.LE | tirx.LT | tirx.GE | tirx.GT):
        a, b = condition.a, condition.b
        is_less, is_strict = (
            isinstance(condition, tirx.LE | tirx.LT),
            isinstance(condition, tirx.LT | tirx.GT),
        )
        small, large = (a, b) if is_less else (b, a)
        if not holds:
            small, large, is_strict = large, small, not is_strict
        yield (small + 1, large) if is_strict else (small, large)
