"""Where a selection of an axis lies before a reshape."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import tvm
from tvm import tirx

from .._values import is_one
from .selection import NotPerHead, Selection


def through_reshape(before: list, after: list, selection: Selection) -> Selection:
    """A selection of the shape `after`, in the shape `before`.

    Raises
    ------
    NotPerHead
        Where the selected entries are no selection of one axis before, each index of one head.
    """
    inner, outer = _matched(before, after, selection.axis)
    if len(inner) == len(outer) == 1:
        return replace(selection, axis=inner[0])
    extents = [_static(after[a]) for a in outer]
    flat = np.arange(math.prod(extents)).reshape(extents)
    flat = flat.take(selection.index, selection.axis - outer[0])
    heads = np.broadcast_to(
        selection.heads.reshape([-1 if a == selection.axis else 1 for a in outer]), flat.shape
    )
    return _one_axis([_static(before[a]) for a in inner], inner[0], flat.ravel(), heads.ravel())


def _one_axis(extents: list[int], first: int, flat: np.ndarray, heads: np.ndarray) -> Selection:
    """`flat`, entries of a block of these extents and `heads`, as a selection of one axis."""
    whole = np.arange(math.prod(extents)).reshape(extents)
    for axis, along in enumerate(np.unravel_index(flat, extents)):
        _, at, inverse = np.unique(along, return_index=True, return_inverse=True)
        is_one_head = np.array_equal(heads[at][inverse], heads)
        at = np.sort(at)
        if is_one_head and np.array_equal(whole.take(along[at], axis).ravel(), flat):
            return Selection(first + axis, along[at], heads[at])
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
        raise NotPerHead(f"R.reshape joins heads with a symbolic extent ({extent})")
    return int(extent)
