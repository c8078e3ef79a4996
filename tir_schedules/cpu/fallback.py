"""A schedule for llvm of every PrimFunc that has no rule of its own: parallel and vectorised."""

from __future__ import annotations

from math import prod

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.dlight import ScheduleRule
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.target import Target

from ..cpu_target import vector_lanes
from ..tir_nodes import is_const
from .leaf_loops import vectorize_leaf_loops
from .loop_nests import Block, attempt, blocks_of, inline_producers, is_plain_loop_nest
from .small_loops import run_small_loops_serially

# Innermost iterations from which a parallel region, which costs 1 to 3 us, pays.
PARALLEL_WORK = 16384


class CpuFallback(ScheduleRule):
    """Element-wise chains, softmax, norms, reductions, layout changes and the like, on llvm.

    Cheap producers are inlined. What is left is put into groups of blocks that share their leading
    axes (rows); a group becomes one parallel loop over rows, so a row's intermediate results stay
    in cache and never exist in full. Innermost loops are vectorised, sums by partial results.

    Softmax, before::

        for i, k: max[i] = max(max[i], x[i, k])
        for i, k: e[i, k] = exp(x[i, k] - max[i])
        for i, k: sum[i] += e[i, k]
        for i, k: y[i, k] = e[i, k] / sum[i]

    and after::

        parallel for i:
            m[0:16] = max(m[0:16], x[i, k:k+16]) for k by 16;  max = fold(m);  the rest one by one
            e[k:k+16] = exp(x[i, k:k+16] - max) for k by 16; ...
            ...

    Leaves alone (returns None): targets other than llvm, and functions with blocks that are
    neither injective nor a plain reduction (sort, scan, scatter, extern calls). Run
    `RewriteDataflowReshape` first: it turns reshapes into views only if it finds them unscheduled.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        if target.kind.name != "llvm" or not isinstance(func, tirx.PrimFunc):
            return None
        if not is_plain_loop_nest(func):
            return None
        sch = Schedule(func)
        if normalize_prim_func(sch) is None:
            return None
        if any(block.is_empty for block in blocks_of(sch)):
            return None  # TVM divides by the extents of loops that it fuses
        inline_producers(sch)
        _schedule_groups(sch)
        func = vectorize_leaf_loops(sch.mod["main"], vector_lanes(target))
        return Schedule(run_small_loops_serially(func, PARALLEL_WORK))


def _schedule_groups(sch: Schedule) -> None:
    """From the last block backwards: each takes along the producers that share its rows."""
    pending = blocks_of(sch)
    while pending:
        anchor = pending.pop()
        members, rows = _row_group(anchor, pending)
        placed = _schedule_group(sch, anchor, members, rows)
        pending = [block for block in pending if block not in placed]


def _row_group(anchor: Block, before: list[Block]) -> tuple[list[Block], int]:
    """The blocks to compute per row of `anchor`, and how many leading axes make a row."""
    group, rows = [anchor], anchor.row_axes
    for block in reversed(before):
        consumers = [other for other in [*before, anchor] if other.reads(block)]
        inside = consumers and all(consumer in group for consumer in consumers)
        shared = min([rows, block.row_axes, *(block.shared_rows(c) for c in consumers)])
        if inside and shared and not _loses_parallelism(anchor, rows, shared):
            group, rows = [*group, block], shared
    if all(len(block.spatial) + len(block.reduced) <= rows for block in group):
        rows -= 1  # leave an axis for the vectors
    return (group[1:], rows) if rows > 0 else ([], 0)


def _loses_parallelism(anchor: Block, rows: int, shared: int) -> bool:
    def tasks(count: int) -> int:
        return prod(axis.extent or PARALLEL_WORK for axis in anchor.spatial[:count])

    return tasks(shared) < 8 <= tasks(rows)


def _schedule_group(sch: Schedule, anchor: Block, members: list[Block], rows: int) -> list[Block]:
    """Loop over the rows of `anchor`, with `members` inside; those that could be moved."""
    if rows == 0:
        depth = _split_single_axis(sch, anchor)
        _schedule_inner(sch, anchor, depth)
        return []
    row = sch.fuse(*anchor.row_loops(sch, rows))
    placed = [b for b in members if attempt(sch.compute_at, b.rv, row, True)]
    if max(block.work for block in [anchor, *placed]) >= PARALLEL_WORK:
        sch.parallel(row)
    for block in [anchor, *placed]:
        _schedule_inner(sch, block, 1)
    return placed


def _schedule_inner(sch: Schedule, block: Block, depth: int) -> None:
    """A reduction over a strided axis goes outside the contiguous one, which takes the vectors."""
    if not block.reduces_columns:
        return
    inner = [
        loop for loop in sch.get_loops(block.rv)[depth:] if not is_const(sch.get(loop).extent, 1)
    ]
    reduced = inner[-len(block.reduced) :]
    columns = inner[-len(block.reduced) - 1 : -len(block.reduced)]
    if columns and attempt(sch.reorder, *reduced, *columns):
        attempt(sch.decompose_reduction, block.rv, reduced[0])


def _split_single_axis(sch: Schedule, block: Block) -> int:
    """Parallel chunks of the only axis, if its extent has a fitting divisor; loops this adds."""
    extent = block.spatial[0].extent if block.spatial else None
    if extent is None or block.work < PARALLEL_WORK:
        return 0
    chunk = next((c for c in (4096, 1024, 256, 64) if extent % c == 0 and extent // c > 1), None)
    if chunk is None:
        return 0
    loops = block.row_loops(sch, 1)
    outer, _ = sch.split(loops[-1], [None, chunk])
    sch.parallel(sch.fuse(*loops[:-1], outer))
    return 1
