"""Tensors joined from parts: views of the one that is read, or of what all parts are slices of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tvm import relax

from .._tensors import Element, resolve, shape_of
from .index_domain import Index, integer, is_integer

if TYPE_CHECKING:
    from .view_steps import ViewSteps


def concat(views: ViewSteps, call: relax.Call, indices: list[Index]) -> Element | None:
    """Where the place is proved to lie in one of the parts, or these are slices in a row."""
    parts = resolve(call.args[0], views.lookup)
    axis = int(call.attrs.axis or 0) % len(indices)
    if not isinstance(parts, relax.Tuple):
        return None
    dims = [dims for part in parts.fields if (dims := shape_of(part)) is not None]
    if len(dims) < len(parts.fields):
        return None
    for shape in dims:
        views.domain.note_shape(shape)
    extents = [shape[axis] for shape in dims]
    found = _part(views, parts.fields, extents, axis, list(indices))
    if found or not all(views.domain.is_equal(extent, extents[0]) for extent in extents):
        return found
    number, indices[axis] = views.domain.divide(indices[axis], extents[0])
    return _regular(views, parts.fields, number, indices)


def stack(views: ViewSteps, call: relax.Call, indices: list[Index]) -> Element | None:
    """As `concat`, of parts that have no such axis."""
    parts = resolve(call.args[0], views.lookup)
    if not isinstance(parts, relax.Tuple):
        return None
    number = indices.pop(int(call.attrs.axis or 0) % len(indices))
    if is_integer(number):
        return parts.fields[int(number)], indices
    return _regular(views, parts.fields, number, indices)


def _part(
    views: ViewSteps,
    parts: Sequence[relax.Expr],
    extents: list[Index],
    axis: int,
    indices: list[Index],
) -> Element | None:
    for part, extent in zip(parts, extents, strict=True):
        behind = indices[axis] - extent
        if views.domain.is_natural(-behind - 1):
            return part, indices
        if not views.domain.is_natural(behind):
            return None
        indices[axis] = views.domain.simplify(behind)
    return None


def _regular(
    views: ViewSteps, parts: Sequence[relax.Expr], number: Index, indices: list[Index]
) -> Element | None:
    """The element of part `number`, where all parts are views of one tensor that begin at
    first + (number // times mod period) · stride along each axis."""
    below: list[list[Element]] = []
    for part in parts:
        below.append(list(_chain(views, part, indices)))
        if not any(_same(views, a, b) for a, _ in below[0] for b, _ in below[-1]):
            return None
    for tensor, _ in below[0]:
        places = [next((at for x, at in one if _same(views, x, tensor)), None) for one in below]
        known = [place for place in places if place is not None]
        if len(known) < len(parts):
            continue
        moved = [_moved(views, number, starts) for starts in zip(*known, strict=True)]
        whole = [index for index in moved if index is not None]
        if len(whole) == len(moved):
            return tensor, whole
    return None


def _moved(views: ViewSteps, number: Index, starts: Sequence[Index]) -> Index | None:
    domain = views.domain
    steps = [domain.simplify(start - starts[0]) for start in starts]
    if not all(map(is_integer, steps)):
        return starts[0] if all(domain.is_equal(start, starts[0]) for start in starts) else None
    offsets = [int(step) for step in steps]
    times = next((n for n, offset in enumerate(offsets) if offset), None)
    if times is None:
        return starts[0]
    firsts = offsets[::times]
    period = next((n for n, offset in enumerate(firsts) if n and not offset), len(firsts))
    if any(x != n // times % period * offsets[times] for n, x in enumerate(offsets)):
        return None
    group = domain.divide(number, integer(times))[0]
    if period < len(firsts):
        group = domain.divide(group, integer(period))[1]
    return domain.simplify(starts[0] + group * offsets[times])


def _chain(views: ViewSteps, tensor: relax.Expr, indices: Sequence[Index]) -> Iterator[Element]:
    """The element in `tensor`, then in each tensor below."""
    below: Element | None = (tensor, list(indices))
    while below is not None:
        yield below
        below = views.step(resolve(below[0], views.lookup), list(below[1]))


def _same(views: ViewSteps, a: relax.Expr, b: relax.Expr) -> bool:
    return resolve(a, views.lookup).same_as(resolve(b, views.lookup))
