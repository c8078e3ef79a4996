"""The value at a place of a tensor that is computed from shapes: positions, comparisons, masks.

An interpreter of index arithmetic. What depends on run-time data, or has no rule here, is a new
variable: unknown, but the same for the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax, tirx
from tvm.ir import GenericConst
from tvm_ffi import StructuralKey

from .._tensors import Lookup, broadcast, resolve, shape_of
from .constant_values import constant_value
from .formulas import MAX_CASES, Formulas, TooManyCases, cases
from .index_domain import Domain, Index
from .number_rules import NUMBER_RULES
from .truth_rules import TRUTH_RULES
from .value_casts import Unknown
from .view_steps import ViewSteps

_MAX_STEPS, _MAX_DEPTH = 4000, 60  # values that are used twice may unfold without end
_RULES = {f"relax.{name}": rule for name, rule in (NUMBER_RULES | TRUTH_RULES).items()}
# The greatest summand, factor of a position, and factor of a product of two, for which sums surely
# do not wrap around.
_GREATEST = {"int32": (1 << 24, 1 << 8, 0), "int64": (1 << 48, 1 << 24, 1 << 16)}

Note = Callable[[relax.Expr, Sequence[Index], Index], None]


class IndexValues:
    """Values of elements, over the axes of a domain.

    `note(tensor, place, value)` is told what holds at all places of the domain.
    """

    def __init__(self, lookup: Lookup, domain: Domain, note: Note | None = None) -> None:
        self.lookup, self.domain, self._note = lookup, domain, note
        self.formulas = Formulas(domain)
        self.views = ViewSteps(lookup, domain, self.element)
        self._steps = self._depth = 0
        self._unknown: dict[tuple, tirx.Var] = {}

    def element(self, expr: relax.Expr, at: Sequence[Index]) -> Index:
        """The value of `expr` at a place: int64, bool, or float64 constants by cases."""
        chain = [(expr, list(at))]
        while (
            step := self.views.step(resolve(chain[-1][0], self.lookup), chain[-1][1])
        ) is not None:
            chain.append(step)
        value = self._value(resolve(chain[-1][0], self.lookup), chain[-1][1])
        if self._note is not None and not self.domain.is_assuming:
            for source, place in reversed(chain):
                self._note(source, place, value)
        return value

    def _value(self, computed: relax.Expr, at: list[Index]) -> Index:
        self._steps += 1
        self._depth += 1
        try:
            return self._computed(computed, at)
        except (Unknown, TooManyCases, OverflowError):
            return self._variable(computed, at)
        finally:
            self._depth -= 1

    def _computed(self, expr: relax.Expr, at: list[Index]) -> Index:
        if self._steps > _MAX_STEPS or self._depth > _MAX_DEPTH:
            raise Unknown
        if isinstance(expr, GenericConst):
            return self._constant(expr, at)
        rule = _RULES.get(getattr(getattr(expr, "op", None), "name", ""))
        if rule is None:
            raise Unknown
        shape = shape_of(expr)
        if shape is not None:
            self.domain.note_shape(shape)
        return self._in_range(rule(self, expr, at), str(expr.ty.dtype))

    def _in_range(self, value: Index, dtype: str) -> Index:
        """Refuse integers that may have wrapped around, and formulas of too many cases."""
        greatest, found = _GREATEST.get(dtype, (128, 0, 0)), list(cases(value))
        if len(found) > MAX_CASES:
            raise TooManyCases
        for case in found if str(value.ty) == "int64" else ():
            p = self.domain.polynomial(case)
            is_known = isinstance(case, tirx.Var) or self.domain.is_bounded(p)
            if not is_known or any(abs(c) > greatest[len(m)] for m, c in p.terms.items()):
                raise Unknown
        return value

    def _constant(self, const: GenericConst, at: list[Index]) -> Index:
        value = constant_value(const.value.numpy(), at, self.formulas)
        if value is None:
            raise Unknown
        return self._in_range(value, str(const.ty.dtype))

    def _variable(self, expr: relax.Expr, at: Sequence[Index]) -> tirx.Var:
        key = (expr, *(StructuralKey(index) for index in at))
        if key not in self._unknown:
            dtype = str(getattr(expr.ty, "dtype", "float64"))
            kind = dtype if dtype == "bool" else "int64" if "int" in dtype else "float64"
            self._unknown[key] = tirx.Var("unknown", kind)
        return self._unknown[key]

    def operands(self, call: relax.Call, at: list[Index]) -> list[Index]:
        return [self.operand(call, arg, at) for arg in call.args]

    def operand(self, call: relax.Call, arg: relax.Expr, at: list[Index]) -> Index:
        """An argument at the place of a broadcast op's result."""
        shape = shape_of(call)
        place = None if shape is None else broadcast(arg, at, shape, self.domain)
        if place is None:
            raise Unknown
        return self.element(arg, place)
