"""Sums in TE over the elements that share a scale, in float64.

The last group of a row may be shorter, and a tensor may be empty: a reduction over nothing would
leave its result unset, so every axis has an element, which counts only if it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tvm import te, tirx
from tvm.s_tir import Schedule, dlight
from tvm.target import Target

from .affine import AffineFormat

# Attribute of the PrimFuncs that are made of these sums.
SUMS_ATTR = "sits.group_sums"
Expr: TypeAlias = Any
Index: TypeAlias = Sequence[Expr]


class GroupSums(dlight.ScheduleRule):
    """On a GPU a thread for every sum, and for every element of what is computed beside them.

    `dlight.gpu.GeneralReduction` would run a tensor with one scale in one thread. Other functions
    and targets are left to the rules that follow (returns None).
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        if not isinstance(func, tirx.PrimFunc) or SUMS_ATTR not in func.attrs:
            return None
        return dlight.gpu.Fallback().apply(func, target, tunable)


def sum_per_param(
    form: AffineFormat,
    shape: Index,
    param_shape: Index,
    dtype: str,
    term: Callable[[Index, Index], Expr],
    name: str,
    finish: Callable[[Expr, Index], Expr] = lambda total, param: total,
) -> te.Tensor:
    """finish(sum of term(at, param), param) for every scale, in `dtype`.

    Parameters
    ----------
    form : AffineFormat
        Says which elements share a scale.
    shape, param_shape : sequences of extents
        Of the tensor and of the scale.
    term : (index of an element, index of its scale) -> float64 expression
    finish : (float64 sum, index of the scale) -> expression
    """
    if form.group_size is not None:
        sums = _group_sums(form, shape, param_shape, term, name)
    elif param_shape:
        sums = _channel_sums(form.axis % len(shape), shape, term, name)
    else:
        sums = _sum_of_all(shape, term, name)
    return te.compute(
        param_shape, lambda *param: finish(sums(*param), param).astype(dtype), name=name
    )


def _group_sums(
    form: AffineFormat, shape: Index, groups: Index, term: Callable, name: str
) -> te.Tensor:
    axis = form.axis % len(shape)
    size = shape[axis] if form.group_size == -1 else form.group_size
    members = _axes({axis: size})

    def total(*param: tirx.Var) -> Expr:
        at = list(param)
        at[axis] = param[axis] * size + members[axis].var
        return _sum(term(at, param), {axis: size}, members, shape, at)

    return te.compute(groups, total, name=f"{name}_sum")


def _channel_sums(channel: int, shape: Index, term: Callable, name: str) -> te.Tensor:
    sizes = {i: n for i, n in enumerate(shape) if i != channel}
    axes = _axes(sizes)

    def total(param: tirx.Var) -> Expr:
        at = [axes[i].var if i in axes else param for i in range(len(shape))]
        return _sum(term(at, [param]), sizes, axes, shape, at)

    return te.compute([shape[channel]], total, name=f"{name}_sum")


def _sum_of_all(shape: Index, term: Callable, name: str) -> te.Tensor:
    """By rows, then of these: rows are work for the threads of a GPU."""
    if len(shape) > 1:
        *outer, last = shape
        columns = _axes({0: last})

        def row(*at: tirx.Var) -> Expr:
            whole = [*at, columns[0].var]
            return _sum(term(whole, []), {0: last}, columns, [last], whole[-1:])

        rows = te.compute(outer, row, name=f"{name}_rows")
        return _sum_of_all(outer, lambda at, _: rows(*at), name)
    sizes = dict(enumerate(shape))
    axes = _axes(sizes)
    at = [axes[i].var for i in axes]
    return te.compute((), lambda: _sum(term(at, []), sizes, axes, shape, at), name=f"{name}_sum")


def _axes(sizes: Mapping[int, Expr]) -> dict[int, tirx.IterVar]:
    return {i: te.reduce_axis((0, _at_least_one(n)), f"r{i}") for i, n in sizes.items()}


def _sum(
    value: Expr,
    sizes: Mapping[int, Expr],
    axes: Mapping[int, tirx.IterVar],
    shape: Index,
    at: Index,
) -> Expr:
    """The sum over `axes` of `value` at `at`, where that lies in `shape`."""
    exists = [at[i] < shape[i] for i in axes if not _fills(shape[i], sizes[i])]
    if exists:
        value = tirx.if_then_else(tirx.all(*exists), value, tirx.const(0, "float64"))
    return te.sum(value, axis=list(axes.values())) if axes else value


def _at_least_one(extent: Expr) -> Expr:
    return extent if isinstance(extent, int) else tirx.max(extent, tirx.const(1, extent.ty.dtype))


def _fills(extent: Expr, size: Expr) -> bool:
    """Whether groups of `size` provably are all full."""
    static = isinstance(extent, tirx.IntImm) and extent.value > 0
    return static and extent.value % int(size) == 0
