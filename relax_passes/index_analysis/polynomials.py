"""Integer polynomials in numbered unknowns: what index arithmetic on symbolic shapes needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Monomial = tuple[int, ...]  # the numbers of its factors, sorted; () is 1


class Polynomial:
    """Σ coefficient · Π unknowns, always in normal form: equal values have equal `terms`."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms = {monomial: c for monomial, c in terms.items() if c}

    @classmethod
    def constant(cls, value: int) -> Polynomial:
        return cls({(): value})

    @classmethod
    def unknown(cls, number: int) -> Polynomial:
        return cls({(number,): 1})

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for monomial, c in other.terms.items():
            terms[monomial] = terms.get(monomial, 0) + c
        return Polynomial(terms)

    def __neg__(self) -> Polynomial:
        return Polynomial({monomial: -c for monomial, c in self.terms.items()})

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + -other

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms: dict[Monomial, int] = {}
        for a, c in self.terms.items():
            for b, d in other.terms.items():
                monomial = tuple(sorted(a + b))
                terms[monomial] = terms.get(monomial, 0) + c * d
        return Polynomial(terms)

    @property
    def value(self) -> int | None:
        """The number, if it has no unknown."""
        return self.terms.get((), 0) if self.terms.keys() <= {()} else None

    def unknowns(self) -> set[int]:
        return {number for monomial in self.terms for number in monomial}

    def slope(self, number: int) -> tuple[Polynomial, Polynomial] | None:
        """(a, b) with self = a · unknown + b; None where it is not linear in the unknown."""
        a: dict[Monomial, int] = {}
        b: dict[Monomial, int] = {}
        for monomial, c in self.terms.items():
            power = monomial.count(number)
            if power > 1:
                return None
            rest = tuple(n for n in monomial if n != number)
            (a if power else b)[rest] = c
        return Polynomial(a), Polynomial(b)

    def replace(self, number: int, value: Polynomial) -> Polynomial:
        """`value` in place of one unknown."""
        result = Polynomial({})
        for monomial, c in self.terms.items():
            term = Polynomial({tuple(n for n in monomial if n != number): c})
            for _ in range(monomial.count(number)):
                term = term * value
            result = result + term
        return result

    def divide(self, divisor: Polynomial) -> tuple[Polynomial, Polynomial]:
        """(q, r) with self = q · divisor + r, by long division; r is not bounded."""
        leading, by = max(divisor.terms.items(), key=lambda term: (len(term[0]), term))
        quotient, rest = Polynomial({}), self
        for monomial, c in _by_degree(self):
            factor = _without(monomial, leading)
            if factor is None or c // by == 0:
                continue
            step = Polynomial({factor: c // by})
            quotient, rest = quotient + step, rest - step * divisor
        return quotient, rest


def _by_degree(polynomial: Polynomial) -> Iterator[tuple[Monomial, int]]:
    yield from sorted(polynomial.terms.items(), key=lambda term: (-len(term[0]), term))


def _without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    """The quotient of two monomials, None where it is none."""
    rest = list(monomial)
    for factor in factors:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)
