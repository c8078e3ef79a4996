"""Elements of tensors at symbolic indices, followed back through views.

"The element of K at (b, h, j, d)" says which keys a product reads, however they are laid out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from tir_schedules.tir_nodes import substitute, uses

from ..index_analysis.index_domain import Domain, Index, integer, is_integer
from ..index_analysis.index_values import IndexValues
from ..index_analysis.view_steps import regroup, resolve
from .graph import Graph, NearMiss, shape_of


@dataclass(frozen=True)
class Element:
    """tensor[indices]."""

    tensor: relax.Expr
    indices: tuple[Index, ...]

    def depends_on(self, axis: tirx.Var) -> bool:
        return any(uses(index, axis) for index in self.indices)


class Points:
    """The points of one block: axes in their ranges, and elements of tensors at them."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.domain = graph, Domain()
        self._views = IndexValues(graph.bound.get, self.domain).views

    def axis(self, name: str, extent: Index) -> tirx.Var:
        self.domain.note_shape([extent])
        return self.domain.axis(name, extent)

    def axes_of(self, tensor: relax.Expr, name: str) -> tuple[tirx.Var, ...]:
        """New axes over a tensor."""
        return tuple(self.axis(f"{name}{n}", extent) for n, extent in enumerate(shape_of(tensor)))

    def simplified(self, element: Element) -> Element:
        return replace(element, indices=tuple(map(self.domain.simplify, element.indices)))

    def at(self, element: Element, values: Mapping[tirx.Var, Index]) -> Element:
        """The element with axes replaced."""
        new = tuple(substitute(index, values) for index in element.indices)
        return self.simplified(Element(element.tensor, new))

    def step(self, element: Element) -> Element | None:
        """The same element in the tensor that its tensor is a view of."""
        value = resolve(element.tensor, self.graph.bound.get)
        found = self._views.step(value, list(element.indices))
        return None if found is None else self.simplified(Element(found[0], tuple(found[1])))

    def chain(self, element: Element) -> Iterator[Element]:
        """The element itself, then in each tensor below."""
        below: Element | None = element
        while below is not None:
            yield below
            below = self.step(below)

    def same_shape(self, a: relax.Expr, b: relax.Expr) -> bool:
        return self.are_equal(shape_of(a), shape_of(b))

    def are_equal(self, a: Sequence[Index], b: Sequence[Index]) -> bool:
        return len(a) == len(b) and all(map(self.domain.is_equal, a, b))

    def is_same(self, a: Element, b: Element) -> bool:
        of = self.graph.of
        return of(a.tensor).same_as(of(b.tensor)) and self.are_equal(a.indices, b.indices)

    def reduces(self, op: str, reduced: Element, whole: Element, axis: tirx.Var) -> bool:
        """Whether `reduced` is the max (sum, …) of `whole` over all values of `axis`."""
        *_, deepest = self.chain(reduced)
        name, call = self.graph.call(deepest.tensor)
        if name != op or not self.graph.of(call.args[0]).same_as(self.graph.of(whole.tensor)):
            return False
        dims = [int(i) % len(whole.indices) for i in call.attrs.axis or ()]
        if len(dims) != 1 or not self.domain.is_equal(whole.indices[dims[0]], axis):
            return False
        kept = [i for n, i in enumerate(whole.indices) if n != dims[0]]
        own = list(deepest.indices)
        if call.attrs.keepdims:
            del own[dims[0]]
        return self.are_equal(kept, own)

    def forward(self, call: relax.Call, element: Element, result: relax.Var) -> Element:
        """The element of a view's result that is `element` of its argument.

        Raises
        ------
        NearMiss
            If the view drops or repeats elements.
        """
        name = call.op.name.removeprefix("relax.")
        if name == "permute_dims":
            rank = len(element.indices)
            order = call.attrs.axes
            axes = reversed(range(rank)) if order is None else (int(i) % rank for i in order)
            return Element(result, tuple(element.indices[i] for i in axes))
        source = shape_of(call.args[0]) if name in _RESHAPES else []
        target = shape_of(result)
        if not source or not self.domain.is_equal(product(source), product(target)):
            raise NearMiss("weights-changed", f"R.{name} drops or repeats weights", result)
        found = regroup(list(element.indices), source, target, self.domain)
        return self.simplified(Element(result, tuple(found)))


_RESHAPES = ("reshape", "flatten", "expand_dims", "squeeze", "broadcast_to")


def broadcast_element(tensor: relax.Expr, result: Element) -> Element:
    """The element of an operand that elementwise arithmetic meets in `result`."""
    shape = shape_of(tensor)
    indices = result.indices[len(result.indices) - len(shape) :]
    met = [integer(0) if is_integer(e, 1) else i for e, i in zip(shape, indices, strict=True)]
    return Element(tensor, tuple(met))


def product(shape: Sequence[Index]) -> Index:
    """The number of elements."""
    result: Index = integer(1)
    for extent in shape:
        result = result * extent
    return result


def flat(indices: Sequence[Index], shape: Sequence[Index], domain: Domain | None = None) -> Index:
    """The row-major position of an element, simplified in `domain`."""
    place: Index = integer(0)
    for index, extent in zip(indices, shape, strict=True):
        place = place * extent + index
        if domain is not None:  # before the next extent hides that n // 4 * 4 + n % 4 is n
            place = domain.simplify(place)
    return place
