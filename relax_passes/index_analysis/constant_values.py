"""Constants as formulas of the place: a stored mask is a band, a stored arange is a line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx

from .formulas import FALSE, TRUE, Formulas, real
from .index_domain import Index, integer


def constant_value(array: np.ndarray, at: Sequence[Index], formulas: Formulas) -> Index | None:
    """The value of a constant at a place, None where it follows no rule.

    A rule holds for every element: all equal; integers linear in the indices; or two values, one
    inside a diagonal band of the last two axes, the other outside.
    """
    if array.size == 0:
        return None
    if all(isinstance(index, tirx.IntImm) for index in at):
        place = tuple(int(index) for index in at)
        inside = all(0 <= i < n for i, n in zip(place, array.shape, strict=True))
        return _leaf(array[place]) if inside else None
    first = array.flat[0]
    if (array == first).all():
        return _leaf(first)
    if array.dtype.kind in "iu":
        line = _line(array, at, formulas)
        if line is not None:
            return line
    return _band(array, at, formulas)


def _leaf(value: np.generic) -> Index | None:
    if value.dtype == bool:
        return TRUE if value else FALSE
    if value.dtype.kind in "iu":
        return integer(int(value))
    return None if np.isnan(value) else real(float(value))


def _line(array: np.ndarray, at: Sequence[Index], formulas: Formulas) -> Index | None:
    """c0 + Σ step · index."""
    origin = int(array.flat[0])
    value: Index = integer(origin)
    fitted = np.full(array.shape, origin, dtype=np.int64)
    for axis, size in enumerate(array.shape):
        if size == 1:
            continue
        step = int(array[tuple(int(a == axis) for a in range(array.ndim))]) - origin
        fitted = fitted + step * np.arange(size).reshape(
            [-1 if a == axis else 1 for a in range(array.ndim)]
        )
        value = value + step * at[axis]
    return formulas.domain.simplify(value) if (fitted == array).all() else None


def _band(array: np.ndarray, at: Sequence[Index], formulas: Formulas) -> Index | None:
    """One value where lower ≤ column - row ≤ upper, another elsewhere, the same in all matrices."""
    if array.ndim < 2:
        return None
    matrices = array.reshape(-1, *array.shape[-2:])
    matrix = matrices[0]
    if not (matrices == matrix).all():
        return None
    corner = matrix[0, 0]
    other = matrix[matrix != corner]
    if other.size == 0 or not (other == other[0]).all():
        return None
    for inner, outer in ((corner, other[0]), (other[0], corner)):
        bounds = _bounds(matrix == inner)
        values = _leaf(inner), _leaf(outer)
        if bounds is not None and values[0] is not None and values[1] is not None:
            return formulas.choose(_between(at[-1] - at[-2], *bounds, formulas), *values)
    return None


def _between(shift: Index, lower: int | None, upper: int | None, formulas: Formulas) -> Index:
    above = TRUE if lower is None else formulas.at_most(integer(lower), shift)
    below = TRUE if upper is None else formulas.at_most(shift, integer(upper))
    return formulas.both(above, below)


def _bounds(inside: np.ndarray) -> tuple[int | None, int | None] | None:
    """The least and the greatest column - row of a full band; None for the matrix's own."""
    rows, columns = np.nonzero(inside)
    shift = columns - rows
    lower, upper = int(shift.min()), int(shift.max())
    height, width = inside.shape
    every = np.arange(width)[None, :] - np.arange(height)[:, None]
    if not (inside == ((every >= lower) & (every <= upper))).all():
        return None
    return None if lower == 1 - height else lower, None if upper == width - 1 else upper
