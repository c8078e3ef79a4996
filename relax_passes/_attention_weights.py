"""From a softmax down to the product of weights and values: guards, casts and views in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from relax_passes._attention_elements import Element, Points, broadcast_element
from relax_passes._attention_graph import FLOATS, Graph, NearMiss, dtype_of
from relax_passes._attention_products import Product, product_of

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
    """

    product: Product
    side: int
    element: Element
    own: tuple[tirx.Var, ...]
    origin: tuple
    guards: tuple[Guard, ...]


def reaches_product(graph: Graph, softmax: relax.Var) -> bool:
    """Whether elementwise ops and views lead from a softmax to a product of it."""
    seen, front = {softmax}, [softmax]
    for _ in range(_LONGEST):
        readers = [b.var for var in front for b in graph.readers.get(var, ())]
        names = [graph.call(var)[0] for var in readers]
        if "matmul" in names or "einsum" in names:
            return True
        front = [v for v, n in zip(readers, names, strict=True) if n in _PASSED and v not in seen]
        seen.update(front)
    return False


_PASSED = (
    *("astype", "reshape", "flatten", "permute_dims", "expand_dims", "squeeze", "broadcast_to"),
    *("where", "multiply", "divide", "add", "subtract", "strided_slice"),
)


class WeightReader:
    """Reads downwards from a softmax at the points `axes`, along its one reader."""

    def __init__(self, points: Points, softmax: relax.Var, axes: tuple[tirx.Var, ...]) -> None:
        self.points, self.graph = points, points.graph
        self.element = Element(softmax, axes)
        self.own = points.axes_of(softmax, "w")
        self.origin: tuple = self.own
        self.guards: list[Guard] = []

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
        tested = [var for var in readers if self.graph.call(var)[0] == "isnan"]
        rest = [var for var in readers if var not in tested]
        if tensor in self.graph.results or len(rest) != 1:
            elsewhere = ["the result", *map(str, readers)][tensor not in self.graph.results :]
            message = f"weights are read by {', '.join(map(str, elsewhere)) or 'nothing'}"
            raise NearMiss("weights-used-elsewhere", message, tensor)
        return rest[0]

    def _weights(self, product: Product) -> Weights:
        mine = [operand.same_as(self.element.tensor) for operand in product.operands]
        if mine == [True, True]:
            raise NearMiss("no-value-product", "weights times themselves", product.result)
        own = self.own, self.origin
        return Weights(product, mine.index(True), self.element, *own, tuple(self.guards))

    def _follow(self, reader: relax.Var) -> None:
        name, call = self.graph.call(reader)
        own = self.points.axes_of(reader, "w")
        shown = self.points.step(Element(reader, own))
        if shown is not None:
            self.element = self.points.forward(call, self.element, reader)
            moved = dict(zip(self.own, shown.indices, strict=True))
            self.origin = self.points.at(Element(reader, self.origin), moved).indices
            self.own = own
            return
        if name == "where":
            self._guard(call, reader)
        elif not (name == "astype" and dtype_of(reader) in FLOATS) and not self._is_one(call):
            message = f"weights go through R.{name}" if name else "weights go into a tuple"
            raise NearMiss("weights-changed", message, reader)
        self.element = Element(reader, self.element.indices)

    def _is_one(self, call: Any) -> bool:
        name = call.op.name if call is not None else ""
        factors = {"relax.multiply": (0, 1), "relax.divide": (1,)}.get(name, ())
        return any(self.graph.fill(call.args[n]) == 1.0 for n in factors)

    def _guard(self, call: relax.Call, reader: relax.Var) -> None:
        """where(…, 0, weights) or where(…, weights, 0)."""
        condition, yes, no = call.args
        zero_where = no.same_as(self.element.tensor)
        if self.graph.fill(yes if zero_where else no) != 0.0:
            message = "where() puts something else than 0 in place of weights"
            raise NearMiss("weights-changed", message, reader)
        self.guards.append(Guard(self._condition(condition, zero_where), zero_where, reader))

    def _condition(self, condition: relax.Expr, zero_where: bool) -> Element | None:
        name, test = self.graph.call(condition)
        if name == "isnan" and test.args[0].same_as(self.element.tensor) and zero_where:
            return None
        return broadcast_element(condition, self.element)
