"""One step back through an op that only moves elements: which element of its argument it reads."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx

from .._tensors import Element, Lookup, ValueOf, broadcast, resolve, shape_of
from . import view_joins, view_lookups
from .index_domain import Domain, Index, integer, is_integer
from .reshapes import regroup, unravel


class ViewSteps:
    """One step back; `value_of` gives index tensors their values."""

    def __init__(self, lookup: Lookup, domain: Domain, value_of: ValueOf) -> None:
        self.lookup, self.domain, self.value_of = lookup, domain, value_of

    def step(self, expr: relax.Expr, indices: Sequence[Index]) -> Element | None:
        """The element that `expr` (what a variable is bound to) copies; None if it is no view."""
        if isinstance(expr, relax.TupleGetItem):
            return self._split(expr, list(indices))
        name = getattr(getattr(expr, "op", None), "name", "")
        read = _READS.get(name)
        if read is None or expr.ty.ndim < 0:
            return None
        if shape_of(expr) is not None:
            self.domain.note_shape(expr.ty.shape)
        return read(self, expr, list(indices))

    def reshape(self, call: relax.Call, indices: list[Index]) -> Element | None:
        source, target = call.args[0], shape_of(call)
        dims = shape_of(source)
        if target is None or dims is None:
            return None
        self.domain.note_shape(dims)
        return source, regroup(indices, target, dims, self.domain)

    def permute_dims(self, call: relax.Call, indices: list[Index]) -> Element:
        rank = len(indices)
        axes = call.attrs.axes
        order = list(reversed(range(rank))) if axes is None else [int(a) % rank for a in axes]
        return call.args[0], [indices[order.index(axis)] for axis in range(rank)]

    def expand_dims(self, call: relax.Call, indices: list[Index]) -> Element:
        new = {int(axis) % len(indices) for axis in call.attrs.axis}
        return call.args[0], [index for axis, index in enumerate(indices) if axis not in new]

    def squeeze(self, call: relax.Call, indices: list[Index]) -> Element | None:
        source, axes = call.args[0], call.attrs.axis
        rank, dims = source.ty.ndim, shape_of(source)
        if axes is not None:
            gone = {int(axis) % rank for axis in axes}
        elif dims is not None:
            gone = {axis for axis, dim in enumerate(dims) if is_integer(dim, 1)}
        else:
            return None
        if rank - len(gone) != len(indices):
            return None
        kept = iter(indices)
        return source, [integer(0) if axis in gone else next(kept) for axis in range(rank)]

    def broadcast_to(self, call: relax.Call, indices: list[Index]) -> Element | None:
        shape = shape_of(call)
        places = shape and broadcast(call.args[0], indices, shape, self.domain)
        return None if places is None else (call.args[0], places)

    def repeat(self, call: relax.Call, indices: list[Index]) -> Element | None:
        source, axis = call.args[0], call.attrs.axis
        times = integer(int(call.attrs.repeats))
        if axis is not None:
            at = int(axis) % len(indices)
            indices[at] = self.domain.divide(indices[at], times)[0]
            return source, indices
        dims = shape_of(source)
        if dims is None:
            return None
        flat = self.domain.divide(indices[0], times)[0]
        return source, unravel(flat, dims, self.domain)

    def tile(self, call: relax.Call, indices: list[Index]) -> Element | None:
        dims = shape_of(call.args[0])
        if dims is None:
            return None
        last = indices[len(indices) - len(dims) :]
        pairs = zip(last, dims, strict=True)
        return call.args[0], [self.domain.divide(index, dim)[1] for index, dim in pairs]

    def flip(self, call: relax.Call, indices: list[Index]) -> Element | None:
        dims = shape_of(call)
        if dims is None:
            return None
        axis = int(call.attrs.axis) % len(indices)
        indices[axis] = self.domain.simplify(dims[axis] - 1 - indices[axis])
        return call.args[0], indices

    def strided_slice(self, call: relax.Call, indices: list[Index]) -> Element | None:
        source, axes, begins = call.args[0], call.args[1], call.args[2]
        dims = shape_of(source)
        if dims is None or not all(isinstance(x, relax.Tuple) for x in call.args[1:]):
            return None
        self.domain.note_shape(dims)
        steps = call.args[4].fields if len(call.args) > 4 else [integer(1)] * len(axes.fields)
        for axis, begin, step in zip(axes.fields, begins.fields, steps, strict=True):
            at = int(axis) % len(dims)
            first = self._first(dims[at], begin, step, bool(call.attrs.assume_inbound))
            if first is None:
                return None
            indices[at] = self.domain.simplify(first + indices[at] * step)
        return source, indices

    def _first(self, dim: Index, begin: Index, step: Index, is_inbound: bool) -> Index | None:
        """Where a slice begins, after the wrapping and clamping of out-of-range bounds."""
        if not is_integer(step) or int(step) == 0:
            return None
        natural = self.domain.is_natural
        if is_inbound:
            is_outside = is_integer(begin) and (int(begin) < 0 or _is_endless(begin))
            return None if is_outside else begin
        if is_integer(begin) and int(begin) < 0:
            begin = begin + dim
            if is_integer(begin) and int(begin) < 0:
                begin = integer(0)
        if not is_integer(begin) and not natural(begin):
            return None
        if int(step) > 0:
            return begin  # a begin behind the end leaves nothing to read
        if natural(dim - 1 - begin):
            return begin
        return dim - 1 if _is_endless(begin) or natural(begin - dim) else None

    def _split(self, item: relax.TupleGetItem, indices: list[Index]) -> Element | None:
        call = resolve(item.tuple_value, self.lookup)
        if getattr(getattr(call, "op", None), "name", "") != "relax.split":
            return None
        source, dims = call.args[0], shape_of(call.args[0])
        axis = int(call.attrs.axis) % len(indices)
        begin = _split_begin(call, item.index, dims and dims[axis])
        if begin is None:
            return None
        indices[axis] = self.domain.simplify(indices[axis] + begin)
        return source, indices


_READS = {
    f"relax.{name}": getattr(ViewSteps, name)
    for name in (
        "broadcast_to",
        "expand_dims",
        "flip",
        "permute_dims",
        "repeat",
        "reshape",
        "squeeze",
        "strided_slice",
        "tile",
    )
} | {
    "relax.concat": view_joins.concat,
    "relax.flatten": ViewSteps.reshape,
    "relax.gather_elements": view_lookups.gather_elements,
    "relax.index_tensor": view_lookups.index_tensor,
    "relax.stack": view_joins.stack,
    "relax.take": view_lookups.take,
}


def _is_endless(bound: Index) -> bool:
    """A constant that stands for "to the end", as INT64_MAX does."""
    return is_integer(bound) and int(bound) >= 1 << 40


def _split_begin(call: relax.Call, field: int, dim: Index | None) -> Index | None:
    """Where a field of `R.split` begins on the axis."""
    parts = call.attrs.indices_or_sections
    if isinstance(parts, tirx.IntImm | int):
        if dim is None or not is_integer(dim):
            return None
        return integer(-(-int(dim) // int(parts)) * field)
    return integer(0) if field == 0 else integer(int(parts[field - 1]))
