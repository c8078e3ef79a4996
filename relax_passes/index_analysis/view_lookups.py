"""Lookups that are views: the index tensor is known, and proved to lie inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm import relax, tirx

from .._tensors import Element, broadcast, resolve, shape_of
from .index_domain import Index

if TYPE_CHECKING:
    from .view_steps import ViewSteps


def take(views: ViewSteps, call: relax.Call, indices: list[Index]) -> Element | None:
    source, places = call.args
    is_number = isinstance(places, tirx.IntImm)
    if not (is_number or isinstance(places.ty, relax.TensorType)) or source.ty.ndim < 1:
        return None
    axis, rank = call.attrs.axis, 0 if is_number else places.ty.ndim
    if rank < 0 or (axis is None and source.ty.ndim != 1):
        return None
    at = int(axis or 0) % source.ty.ndim
    value = _place(views, places, indices[at : at + rank], source, at)
    if value is None:
        return None
    return source, [*indices[:at], value, *indices[at + rank :]]


def gather_elements(views: ViewSteps, call: relax.Call, indices: list[Index]) -> Element | None:
    source, places = call.args
    axis = int(call.attrs.axis) % len(indices)
    value = _place(views, places, indices, source, axis)
    if value is None:
        return None
    return source, [*indices[:axis], value, *indices[axis + 1 :]]


def index_tensor(views: ViewSteps, call: relax.Call, indices: list[Index]) -> Element | None:
    """x[t0, t1, …]: the tensors are broadcast together and take the place of as many axes."""
    source, tensors = call.args[0], resolve(call.args[1], views.lookup)
    shape = shape_of(call)
    if shape is None or not isinstance(tensors, relax.Tuple):
        return None
    rank = len(shape) - (source.ty.ndim - len(tensors.fields))
    found: list[Index] = []
    for axis, places in enumerate(tensors.fields):
        at = broadcast(places, indices[:rank], shape[:rank], views.domain)
        value = None if at is None else _place(views, places, at, source, axis)
        if value is None:
            return None
        found.append(value)
    return source, [*found, *indices[rank:]]


def _place(
    views: ViewSteps, places: relax.Expr, at: Sequence[Index], source: relax.Expr, axis: int
) -> Index | None:
    """The value of an index tensor, None unless it is proved to lie inside `axis`."""
    dims = shape_of(source)
    value = places if isinstance(places, tirx.IntImm) else views.value_of(places, at)
    if dims is None or value is None or str(value.ty) != "int64":
        return None
    views.domain.note_shape(dims)
    natural = views.domain.is_natural
    return value if natural(value) and natural(dims[axis] - 1 - value) else None
