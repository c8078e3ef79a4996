"""Formulas at a place of a tensor: truth values, integers and constants by cases.

A value is a PrimExpr: an int64 expression, a bool one, or a float64 constant; `Select` keeps cases
apart and stays outermost, so that arithmetic never hides one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm import tirx
from tvm_ffi import structural_equal

from .index_domain import Domain, Index, integer

TRUE, FALSE = tirx.IntImm("bool", 1), tirx.IntImm("bool", 0)
MAX_CASES = 32


class TooManyCases(Exception):
    """A formula with more cases than anyone writes; its value counts as unknown."""


def real(value: float) -> tirx.FloatImm:
    return tirx.FloatImm("float64", value + 0.0)  # one zero: -0.0 + 0.0 is 0.0


def is_true(value: Index) -> bool:
    return isinstance(value, tirx.IntImm) and bool(int(value))


def is_false(value: Index) -> bool:
    return isinstance(value, tirx.IntImm) and not int(value)


def cases(value: Index) -> Iterator[Index]:
    """The values between which `Select` chooses."""
    if isinstance(value, tirx.Select):
        yield from cases(value.true_value)
        yield from cases(value.false_value)
    else:
        yield value


class Formulas:
    """Builds values that are as simple as the domain proves them to be."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain

    def at_most(self, a: Index, b: Index) -> Index:
        """a ≤ b on integers."""
        return self.apply(self._at_most, a, b)

    def equal(self, a: Index, b: Index) -> Index:
        """a == b on integers."""
        return self.apply(self._equal, a, b)

    def _at_most(self, a: Index, b: Index) -> Index:
        slack = self.domain.excess((a, b))
        if self.domain.is_positive(slack, or_zero=True):
            return TRUE
        return FALSE if self.domain.is_positive(-slack) else a <= b

    def _equal(self, a: Index, b: Index) -> Index:
        difference = self.domain.excess((a, b))
        if self.domain.is_zero(difference):
            return TRUE
        if self.domain.is_positive(difference) or self.domain.is_positive(-difference):
            return FALSE
        return tirx.EQ(a, b)

    def both(self, a: Index, b: Index) -> Index:
        if is_false(a) or is_false(b):
            return FALSE
        if is_true(a) or structural_equal(a, b):
            return b
        return a if is_true(b) else tirx.And(a, b)

    def either(self, a: Index, b: Index) -> Index:
        if is_true(a) or is_true(b):
            return TRUE
        if is_false(a) or structural_equal(a, b):
            return b
        return a if is_false(b) else tirx.Or(a, b)

    def invert(self, a: Index) -> Index:
        if isinstance(a, tirx.IntImm):
            return FALSE if int(a) else TRUE
        if isinstance(a, tirx.Not):
            return a.a
        if isinstance(a, tirx.And):
            return self.either(self.invert(a.a), self.invert(a.b))
        if isinstance(a, tirx.Or):
            return self.both(self.invert(a.a), self.invert(a.b))
        if isinstance(a, tirx.LE):
            return a.b + 1 <= a.a
        if isinstance(a, tirx.Select):
            return self.choose(a.condition, self.invert(a.true_value), self.invert(a.false_value))
        return tirx.Not(a)

    def same(self, a: Index, b: Index) -> Index:
        """a == b on truth values."""
        return self.choose(a, b, self.invert(b))

    def choose(self, condition: Index, a: Index, b: Index) -> Index:
        """a where `condition` holds, else b; all of the same type."""
        if isinstance(condition, tirx.IntImm):
            return a if int(condition) else b
        if structural_equal(a, b):
            return a
        if str(a.ty) != "bool":
            return tirx.Select(condition, a, b)
        return self._choose_truth(condition, a, b)

    def _choose_truth(self, condition: Index, a: Index, b: Index) -> Index:
        if is_false(b):
            return self.both(condition, a)
        if is_true(a):
            return self.either(condition, b)
        if is_false(a):
            return self.both(self.invert(condition), b)
        if is_true(b):
            return self.either(self.invert(condition), a)
        return tirx.Select(condition, a, b)

    def under(self, condition: Index, holds: bool, make: Callable[[], Index]) -> Index:
        """`make()` with what `condition` tells about the places where it holds (or does not)."""
        with self.domain.assuming(condition, holds):
            return make()

    def branch(
        self, condition: Index, make_a: Callable[[], Index], make_b: Callable[[], Index]
    ) -> Index:
        """`choose`, where each value is made knowing its case, and only if the case occurs."""
        if isinstance(condition, tirx.IntImm):
            return make_a() if int(condition) else make_b()
        a = self.under(condition, True, make_a)
        return self.choose(condition, a, self.under(condition, False, make_b))

    def apply(self, function: Callable[..., Index], *values: Index) -> Index:
        """`function` of values without cases, case by case."""
        if sum(1 for value in values for _ in cases(value)) > MAX_CASES:
            raise TooManyCases
        position = next((n for n, v in enumerate(values) if isinstance(v, tirx.Select)), None)
        if position is None:
            return function(*values)
        value, before, after = values[position], values[:position], values[position + 1 :]

        def case(part: Index) -> Index:
            return self.apply(function, *before, part, *after)

        return self.branch(
            value.condition, lambda: case(value.true_value), lambda: case(value.false_value)
        )

    def least(self, a: Index, b: Index) -> Index:
        return self.choose(self.at_most(a, b), a, b)

    def greatest(self, a: Index, b: Index) -> Index:
        return self.choose(self.at_most(a, b), b, a)

    def as_integer(self, truth: Index) -> Index:
        return self.choose(truth, integer(1), integer(0))
