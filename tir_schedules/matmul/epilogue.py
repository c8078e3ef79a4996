"""What follows a matrix product in its PrimFunc, as stages of the product's `Contraction`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import s_tir, tirx
from tvm.sym import Analyzer

from ..contraction import LANES, Point, Stage, loads
from ..tir_nodes import is_const, substitute


def epilogue_stages(
    block: s_tir.SBlock,
    column: tirx.IterVar,
    total: tirx.Var,
    epilogue: Sequence[tuple[s_tir.SBlock, tirx.Expr]],
) -> tuple[Stage, ...] | None:
    """The product and what follows, over the axes of `block`; None if not elementwise.

    Stages of other columns may run in another order, so no two of them write one buffer.
    """
    store = block.body
    stages = [Stage(store.buffer, tuple(store.indices), total.astype(str(store.buffer.dtype)))]
    extents = {axis.var: axis.dom.extent for axis in block.iter_vars}
    for follower, value in epilogue:
        stage = _stage(follower, value, {s.buffer: s for s in stages}, column.var, extents)
        if stage is None or any(
            s.buffer.same_as(stage.buffer) and s.columns != stage.columns for s in stages
        ):
            return None
        stages.append(stage)
    return tuple(stages)


def _stage(
    block: s_tir.SBlock,
    value: tirx.Expr,
    written: Mapping[tirx.Buffer, Stage],
    column: tirx.Var,
    extents: Point,
) -> Stage | None:
    """`block` over the axes of the product, if each point reads what is `written` there."""
    read = [load for load in loads(value) if load.source in written]
    axes = {axis.var: axis.dom.extent for axis in block.iter_vars}
    at = {var: tirx.const(0, str(var.ty)) for var, extent in axes.items() if is_const(extent, 1)}
    for load in read:
        for index, here in zip(load.indices, written[load.source].indices, strict=True):
            axis, first = _axis_and_start(index)
            if axis in axes:
                at[axis] = here - first if first else here
    if len(at) != len(axes):
        return None
    columns = None
    for var, extent in axes.items():
        if _fits(extent, at[var], extents):
            continue
        columns = _columns(extent, at[var], column, extents[column])
        if columns is None:
            return None
    if not all(
        written[load.source].columns in (None, columns)
        and all(
            map(_equal, (substitute(i, at) for i in load.indices), written[load.source].indices)
        )
        for load in read
    ):
        return None
    indices = tuple(substitute(index, at) for index in block.body.indices)
    return Stage(block.body.buffer, indices, substitute(value, at), columns)


def _axis_and_start(index: tirx.Expr) -> tuple[tirx.Expr, int]:
    """a and c of an index ``a + c``."""
    if isinstance(index, tirx.Add) and isinstance(index.b, tirx.IntImm):
        return index.a, index.b.value
    return index, 0


def _columns(
    extent: tirx.Expr, at: tirx.Expr, column: tirx.Var, count: tirx.Expr
) -> tuple[int, int] | None:
    """The columns over which an axis of `extent` runs, `at` being the column less the first."""
    first = Analyzer().simplify(column - at)
    if not all(isinstance(number, tirx.IntImm) for number in (first, extent, count)):
        return None
    columns = first.value, first.value + extent.value
    inside = columns[0] >= 0 and columns[1] <= count.value
    return columns if inside and not any(c % LANES for c in columns) else None


def _equal(a: tirx.Expr, b: tirx.Expr) -> bool:
    return Analyzer().can_prove_equal(a, b)


def _fits(extent: tirx.Expr, at: tirx.Expr, extents: Point) -> bool:
    """Whether an axis of `extent` has just the values of `at`, an axis of the product or 0."""
    if isinstance(at, tirx.IntImm):
        return is_const(extent, 1)
    return at in extents and _equal(extent, extents[at])
