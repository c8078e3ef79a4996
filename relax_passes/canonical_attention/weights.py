"""From a softmax down to the product of weights and values: guards, casts and views in between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from .elements import Element, Points, broadcast_element
from .graph import FLOATS, NearMiss, dtype_of
from .products import Product, product_of
from .reach import VIEWS

_LONGEST = 16  # bindings between a softmax and its product


@dataclass(frozen=True)
class Guard:
    """Weights become 0 where `condition` equals `zero_where`; None: where they are NaN."""

    condition: Element | None
    zero_where: bool
    binding: relax.Var


@dataclass(frozen=True)
class Weights:
    """Where the weights of a softmax go.

    Attributes
    ----------
    product : Product
        Of weights and values.
    side : int
        Which of its operands the weights are.
    element : Element
        Of that operand: the weight at the softmax's axes.
    own, origin : tuple
        Axes of that operand, and the place among the softmax's axes that they show.
    guards : tuple of Guard
    is_returned : bool
        They leave the function, too.
    """

    product: Product
    side: int
    element: Element
    own: tuple[tirx.Var, ...]
    origin: tuple
    guards: tuple[Guard, ...]
    is_returned: bool


_INFINITE = (math.inf, -math.inf)


class WeightReader:
    """Reads downwards from a softmax at the points `axes`, along its one reader but `total`."""

    def __init__(
        self,
        points: Points,
        softmax: relax.Var,
        axes: tuple[tirx.Var, ...],
        total: relax.Expr | None = None,
    ) -> None:
        self.points, self.graph = points, points.graph
        self.element = Element(softmax, axes)
        self.own = points.axes_of(softmax, "w")
        self.origin: tuple = self.own
        self.guards: list[Guard] = []
        self.total = total
        self.seen = {softmax}
        self.is_returned = False

    def read(self) -> Weights:
        """The product with the values, and what is done before it.

        Raises
        ------
        NearMiss
            With the first reader that is none of attention's.
        """
        for _ in range(_LONGEST):
            reader = self._reader()
            product = product_of(self.graph, reader)
            if product is not None:
                return self._weights(product)
            self._follow(reader)
        raise NearMiss("no-value-product", "weights reach no product", self.element.tensor)

    def _reader(self) -> relax.Var:
        tensor = self.element.tensor
        readers = [binding.var for binding in self.graph.readers.get(tensor, ())]
        rest = [var for var in readers if not (var.same_as(self.total) or self._is_test(var))]
        inner = [var for var in rest if not self._is_returned(var)]
        self.is_returned |= tensor in self.graph.results or len(inner) < len(rest)
        if not inner:
            message = f"weights are {'returned' if self.is_returned else 'unused'}, not multiplied"
            raise NearMiss("no-value-product", message, tensor)
        if len(inner) > 1:
            message = f"weights are read by {', '.join(f'`{v.name}`' for v in inner)}"
            raise NearMiss("weights-used-elsewhere", message, tensor)
        return inner[0]

    def _is_test(self, var: relax.Var) -> bool:
        """What reads the shape of weights, or tests for what they never are but by a guard."""
        name, call = self.graph.call(var)
        if name in ("isnan", "isinf", "full_like", "zeros_like", "ones_like"):
            return True
        return name in ("equal", "not_equal") and self.graph.fill(call.args[1]) in _INFINITE

    def _is_returned(self, var: relax.Var) -> bool:
        """Whether nothing but the function's result is made of it."""
        readers = [binding.var for binding in self.graph.readers.get(var, ())]
        name, _ = self.graph.call(var)
        if name not in ("", "astype", *VIEWS) and not self.graph.is_copy(var):
            return False
        is_result = var in self.graph.results
        return (is_result or bool(readers)) and all(map(self._is_returned, readers))

    def _weights(self, product: Product) -> Weights:
        mine = [operand.same_as(self.element.tensor) for operand in product.operands]
        if mine == [True, True]:
            raise NearMiss("no-value-product", "weights times themselves", product.result)
        side, guards = mine.index(True), tuple(self.guards)
        own = self.own, self.origin
        return Weights(product, side, self.element, *own, guards, self.is_returned)

    def _follow(self, reader: relax.Var) -> None:
        name, call = self.graph.call(reader)
        if not isinstance(reader.ty, relax.TensorType):
            raise self._changed(reader)
        own = self.points.axes_of(reader, "w")
        shown = self.points.step(Element(reader, own))
        if shown is not None:
            self.element = self.points.forward(call, self.element, reader)
            moved = dict(zip(self.own, shown.indices, strict=True))
            self.origin = self.points.at(Element(reader, self.origin), moved).indices
            self.own = own
            return
        if self.graph.is_copy(reader):
            pass
        elif name == "where":
            self._guard(call, reader)
        elif not (name == "astype" and dtype_of(reader) in FLOATS) and not self._is_one(call):
            raise self._changed(reader)
        self.element = Element(reader, self.element.indices)
        self.seen.add(reader)

    def _changed(self, reader: relax.Var) -> NearMiss:
        message = f"weights go through {self.graph.words(reader)}"
        return NearMiss("weights-changed", message, reader)

    def _is_one(self, call: Any) -> bool:
        name = call.op.name if call is not None else ""
        factors = {"relax.multiply": (0, 1), "relax.divide": (1,)}.get(name, ())
        return any(self.graph.fill(call.args[n]) == 1.0 for n in factors)

    def _guard(self, call: relax.Call, reader: relax.Var) -> None:
        """where(…, 0, weights) or where(…, weights, 0)."""
        condition, yes, no = call.args
        zero_where = no.same_as(self.element.tensor)
        name, test = self.graph.call(condition)
        is_own = test is not None and test.args[0] in self.seen
        if is_own and zero_where and (name == "isinf" or self._is_infinite(name, test)):
            return  # weights are never infinite
        if self.graph.fill(yes if zero_where else no) != 0.0:
            message = "where() puts something else than 0 in place of weights"
            raise NearMiss("weights-changed", message, reader)
        self.guards.append(Guard(self._condition(condition, zero_where), zero_where, reader))

    def _is_infinite(self, name: str, test: relax.Call) -> bool:
        return name == "equal" and self.graph.fill(test.args[1]) in _INFINITE

    def _condition(self, condition: relax.Expr, zero_where: bool) -> Element | None:
        name, test = self.graph.call(condition)
        if name == "isnan" and test.args[0] in self.seen and zero_where:
            return None
        return broadcast_element(condition, self.element)
