"""Where a selection of an axis lies before a reshape."""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import tirx

from relax_passes._values import is_one
from relax_passes.head_rules.selection import NotPerHead


def through_reshape(
    before: list, after: list, axis: int, index: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray]:
    """The selection `index` of `axis` of the shape `after`, in the shape `before`.

    Returns
    -------
    axis : int
    index : array
    order : array
        For each entry of the new index, a place in the old one that it belongs to.

    Raises
    ------
    NotPerHead
        Where the selected entries are no selection of one axis before.
    """
    inner, outer = _matched(before, after, axis)
    if len(inner) == len(outer) == 1:
        return inner[0], index, np.arange(len(index))
    extents = [_static(after[a]) for a in outer]
    flat = np.arange(math.prod(extents)).reshape(extents)
    flat = flat.take(index, axis - outer[0])
    places = np.broadcast_to(
        np.arange(len(index)).reshape([-1 if a == axis else 1 for a in outer]), flat.shape
    )
    return _one_axis([_static(before[a]) for a in inner], inner[0], flat.ravel(), places.ravel())


def _one_axis(
    extents: list[int], first: int, flat: np.ndarray, places: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray]:
    """`flat`, entries of a block of these extents, as a selection of one of its axes."""
    whole = np.arange(math.prod(extents)).reshape(extents)
    for axis, along in enumerate(np.unravel_index(flat, extents)):
        index, at = np.unique(along, return_index=True)
        index, at = along[np.sort(at)], np.sort(at)
        if np.array_equal(whole.take(index, axis).ravel(), flat):
            return first + axis, index, places[at]
    raise NotPerHead(f"R.reshape joins or cuts heads in {tuple(extents)}")


def _matched(before: list, after: list, axis: int) -> tuple[list[int], list[int]]:
    """The smallest runs of axes of equal product, counted from the right, that hold `axis`.

    An extent of 1 that `after` has and `before` has not is cut from what is right of it.
    """
    inner, outer = len(before), len(after)
    while outer > axis:
        step = _smallest_step(before[:inner], after[:outer])
        ends = inner, outer
        inner, outer = inner - step[0], outer - step[1]
        outer -= max(0, _trailing_ones(after[:outer]) - _trailing_ones(before[:inner]))
    return list(range(inner, ends[0])), list(range(outer, ends[1]))


def _trailing_ones(extents: list) -> int:
    return next((n for n, e in enumerate(reversed(extents)) if not is_one(e)), len(extents))


def _smallest_step(before: list, after: list) -> tuple[int, int]:
    same = tvm.sym.Analyzer().can_prove_equal
    steps = [(i, o) for i in range(1, len(before) + 1) for o in range(1, len(after) + 1)]
    for i, o in sorted(steps, key=sum):
        if same(_product(before[-i:]), _product(after[-o:])):
            return i, o
    raise NotPerHead(f"R.reshape from {before} to {after} moves heads")


def _product(extents: list) -> tvm.ir.Expr:
    return math.prod(extents, start=tirx.const(1, "int64"))


def _static(extent: tvm.ir.Expr) -> int:
    if not isinstance(extent, tirx.IntImm):
        raise NotPerHead(f"R.reshape of heads by a symbolic extent ({extent})")
    return int(extent)
