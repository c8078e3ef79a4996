"""Vectorise the innermost loops of a scheduled PrimFunc: full vectors, then a scalar tail.

TVM's own way, a split with a predicate, is no way to get there: a predicate that depends on the
lane makes `VectorizeLoop` fall back to scalars, and `compute_at` drops the predicate of a block
made by `rfactor`, which then reads past the end. Here no lane ever leaves the loop's range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Range, TensorLoad
from tvm.s_tir import SBlockRealize
from tvm.sym import Analyzer
from tvm.tirx import BufferLoad, BufferStore, Expr, For, ForKind, SeqStmt, Stmt, Var

from ..tir_nodes import (
    collect,
    integer,
    is_branch,
    is_const,
    nest,
    perfect_nest,
    reads,
    sequence,
    serial_loop,
    substitute,
    uses,
    vector_loop,
    with_body,
    with_root_body,
)
from .split_ranges import split_at_branches
from .vector_math import vectorizable_math


def vectorize_leaf_loops(func: tirx.PrimFunc, lanes: int) -> tirx.PrimFunc:
    """`func` with every innermost serial loop in vectors of `lanes`, where that is legal.

    A loop over a spatial axis is legal if each access is contiguous in it, or does not depend on
    it. A reduction (sum, product, max, min) over a contiguous axis goes through `lanes` partial
    results, so float sums are blocked. Any other loop, and one over a block with a predicate,
    stays as it is.

    Parameters
    ----------
    func : PrimFunc
        In S-TIR form: the body is the root block. int32 or int64 loops of any, also symbolic,
        extent.
    lanes : int
        A power of two.
    """
    rewriter = _LeafLoops(lanes)
    body = vectorizable_math(rewriter.visit(func.body.block.body))
    return with_root_body(func, body, rewriter.partials)


class _LeafLoops:
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.partials: list[tirx.Buffer] = []
        self.analyzer = Analyzer()

    def visit(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, SeqStmt):
            return SeqStmt([self.visit(child) for child in stmt.seq])
        if not isinstance(stmt, For):
            return stmt
        self.analyzer.bind(stmt.loop_var, Range.from_min_extent(stmt.min, stmt.extent))
        loops, leaf = perfect_nest(stmt)
        if isinstance(leaf, SBlockRealize) and _is_plain(leaf) and _are_serial(loops):
            rewritten = self.spatial(loops, leaf) or self.reduction(loops, leaf)
            if rewritten is not None:
                return rewritten
        return with_body(stmt, self.visit(stmt.body))

    def spatial(self, loops: list[For], leaf: SBlockRealize) -> Stmt | None:
        """for j: a[j] = e  ->  for jo: a[jo:jo+lanes] = e; for jt: a[jt] = e."""
        if len(loops) > 1 or leaf.block.init is not None or loops[0] not in _spatial(loops, leaf):
            return None
        store = _inlined(leaf.block.body, leaf)
        if not isinstance(store, BufferStore):
            return None
        parts = split_at_branches(loops[0], store, self.analyzer)
        vectors = [self.part(loops[0].loop_var, *part) for part in parts]
        if not any(vectors):
            return None
        return sequence([
            vector or serial_loop(loops[0].loop_var, *part)
            for vector, part in zip(vectors, parts, strict=True)
        ])  # fmt: skip

    def part(self, old: Var, first: Expr, extent: Expr, store: BufferStore) -> Stmt | None:
        """`extent` iterations from `first` in vectors and a tail, or None."""
        width = self.width(extent)
        if width is None:
            return None
        loop = serial_loop(old, first, extent, store)
        self.analyzer.bind(loop.loop_var, Range.from_min_extent(loop.min, extent))
        full = self.lanewise([loop], width, Var("lane", old.ty.dtype), loop.body)
        return None if full is None else sequence([full, _tail(loop.body, [loop], width)])

    def reduction(self, loops: list[For], leaf: SBlockRealize) -> Stmt | None:
        """Start before the loops, not inside them; in partial results per lane where possible."""
        if leaf.block.init is None or _spatial(loops, leaf):
            return None
        update = _reduction_update(leaf)
        width = self.width(loops[-1].extent, most=4)
        if update is not None and width is not None:
            blocked = self.partial_results(loops, update, width)
            if blocked is not None:
                return blocked
        body = nest(loops, _inlined(leaf.block.body, leaf))
        return sequence([_inlined(leaf.block.init, leaf), body])

    def partial_results(self, loops: list[For], update: _Update, width: int) -> Stmt | None:
        """Partial results per lane, folded in halves; the tail is added one by one."""
        store, combine = update.store, update.combine
        partial = tirx.decl_buffer((width,), store.buffer.dtype, f"{store.buffer.name}_partial")
        lane = Var("lane", loops[-1].loop_var.ty.dtype)
        term = combine(BufferLoad(partial, [lane]), update.term)
        accumulate = self.lanewise(loops, width, lane, BufferStore(partial, term, [lane]))
        if accumulate is None:
            return None
        self.partials.append(partial)
        total = combine(update.init, BufferLoad(partial, [integer(0, lane)]))
        return sequence([
            vector_loop(lane, width, BufferStore(partial, update.identity, [lane])),
            accumulate,
            *_fold(partial, combine, width, lane),
            BufferStore(store.buffer, total, store.indices),
            _tail(store, loops, width),
        ])  # fmt: skip

    def width(self, extent: Expr, most: int = 1) -> int | None:
        """Lanes for a loop: up to `most` vectors at once where that leaves no tail."""
        if not isinstance(extent, tirx.IntImm):
            return self.lanes
        if extent.value < self.lanes:
            return extent.value if extent.value in (4, 8) else None
        while extent.value % (most * self.lanes):
            if most == 1:
                break
            most //= 2
        return most * self.lanes

    def lanewise(self, loops: list[For], width: int, lane: Var, store: Stmt) -> Stmt | None:
        """The loops with the last one in whole vectors, or None if an access is not contiguous."""
        loop = loops[-1]
        outer = Var(f"{loop.loop_var.name}_vector", loop.loop_var.ty.dtype)
        count = loop.extent // integer(width, lane)
        analyzer = self.analyzer
        analyzer.bind(outer, Range.from_min_extent(integer(0, lane), count))
        analyzer.bind(lane, Range.from_min_extent(integer(0, lane), integer(width, lane)))
        inner = substitute(store, {loop.loop_var: outer * integer(width, lane) + lane})
        inner = _simplify(inner, analyzer)
        if not _is_vectorizable(inner, lane, analyzer):
            return None
        vector = vector_loop(lane, width, inner)
        return nest(loops[:-1], For(outer, integer(0, lane), count, ForKind.SERIAL, vector))


def _are_serial(loops: Sequence[For]) -> bool:
    return all(
        loop.kind == ForKind.SERIAL and not loop.annotations and is_const(loop.min, 0)
        for loop in loops
    )


def _is_plain(leaf: SBlockRealize) -> bool:
    block = leaf.block
    return is_const(leaf.predicate, 1) and not block.alloc_buffers and not block.match_buffers


def _spatial(loops: Sequence[For], leaf: SBlockRealize) -> list[For]:
    """The loops that bind no reduction axis."""
    reduced = [
        value
        for axis, value in zip(leaf.block.iter_vars, leaf.iter_values, strict=True)
        if axis.iter_type != tirx.IterVar.DataPar
    ]
    return [loop for loop in loops if not any(uses(value, loop.loop_var) for value in reduced)]


def _inlined(stmt: Stmt, leaf: SBlockRealize) -> Stmt:
    """A statement of the block in terms of the loops around it."""
    axes = [axis.var for axis in leaf.block.iter_vars]
    return substitute(stmt, dict(zip(axes, leaf.iter_values, strict=True)))


_COMBINERS = {"Add": tirx.Add, "Mul": tirx.Mul, "Max": tirx.Max, "Min": tirx.Min}


@dataclass(frozen=True)
class _Update:
    """store: a[s] = combine(a[s], term), which starts from a[s] = init."""

    init: Expr
    store: BufferStore
    combine: type
    term: Expr

    @property
    def identity(self) -> Expr:
        """A start for partial results: max and min may count the initial value twice."""
        if self.combine in (tirx.Max, tirx.Min):
            return self.init
        return tirx.const(0 if self.combine is tirx.Add else 1, self.init.ty.dtype)


def _reduction_update(leaf: SBlockRealize) -> _Update | None:
    """The parts of a sum, product, max or min; None for other reductions."""
    if not isinstance(leaf.block.init, BufferStore) or not isinstance(leaf.block.body, BufferStore):
        return None
    init, store = _inlined(leaf.block.init, leaf), _inlined(leaf.block.body, leaf)
    combine = _COMBINERS.get(type(store.value).__name__)
    if combine is None or not init.buffer.same_as(store.buffer):
        return None
    total = BufferLoad(store.buffer, store.indices)
    terms = [x for x in (store.value.a, store.value.b) if not tvm_ffi.structural_equal(x, total)]
    if len(terms) != 1 or reads(terms[0], store.buffer):
        return None
    return _Update(init.value, store, combine, terms[0])


def _fold(partial: tirx.Buffer, combine: type, width: int, lane: Var) -> list[Stmt]:
    """partial[0] = all of partial, by halves: log2(width) dependent steps instead of width."""
    steps = []
    while width > 1:
        width //= 2
        var = Var("lane", lane.ty.dtype)
        low = BufferLoad(partial, [var])
        high = BufferLoad(partial, [var + integer(width, lane)])
        steps.append(vector_loop(var, width, BufferStore(partial, combine(low, high), [var])))
    return steps


def _tail(store: BufferStore, loops: Sequence[For], width: int) -> Stmt | None:
    """The iterations of the last loop that fill no vector, or None if there are none."""
    loop = loops[-1]
    zero, lanes = integer(0, loop.loop_var), integer(width, loop.loop_var)
    count = Analyzer().simplify(loop.extent % lanes)
    if is_const(count, 0):
        return None
    var = Var(f"{loop.loop_var.name}_tail", loop.loop_var.ty.dtype)
    body = substitute(store, {loop.loop_var: loop.extent // lanes * lanes + var})
    outer = [Var(each.loop_var.name, each.loop_var.ty.dtype) for each in loops[:-1]]
    body = substitute(body, {a.loop_var: b for a, b in zip(loops, outer, strict=False)})
    body = For(var, zero, count, ForKind.SERIAL, body)
    for new, old in reversed(list(zip(outer, loops, strict=False))):
        body = For(new, old.min, old.extent, ForKind.SERIAL, body)
    return body


def _is_vectorizable(stmt: Stmt, lane: Var, analyzer: Analyzer) -> bool:
    """Each access contiguous in `lane` or free of it, and no branch that depends on it."""
    ok = True

    def access(load: TensorLoad) -> None:
        nonlocal ok
        ok = ok and _is_contiguous(load.indices, lane, analyzer)

    def call(node: Call) -> None:
        nonlocal ok
        ok = ok and not node.op.name.startswith("tirx.call_")
        ok = ok and not (is_branch(node) and uses(node.args[0], lane))

    tvm_ffi.structural_walk(stmt, [(TensorLoad, access), (Call, call)])
    return ok and _is_contiguous(stmt.indices, lane, analyzer, must=True)


def _is_contiguous(
    indices: Sequence[Expr], var: Var, analyzer: Analyzer, must: bool = False
) -> bool:
    """Whether a step of `var` moves the last index by one and no other, or (unless `must`) none."""
    if not any(uses(index, var) for index in indices):
        return not must
    if any(uses(index, var) for index in indices[:-1]) or collect(indices[-1], TensorLoad):
        return False
    step = substitute(indices[-1], {var: var + integer(1, var)}) - indices[-1]
    return is_const(analyzer.simplify(step), 1)


def _simplify(stmt: BufferStore, analyzer: Analyzer) -> BufferStore:
    """Simplified indices and branch conditions: a lane that changes nothing drops out of them."""

    def load(node: TensorLoad) -> Expr:
        return BufferLoad(node.source, [analyzer.simplify(index) for index in node.indices])

    def branch(call: Call) -> Expr:
        if not is_branch(call):
            return call
        condition, yes, no = call.args
        return tirx.if_then_else(analyzer.simplify(condition), yes, no)

    value = tvm_ffi.structural_map(stmt.value, [(TensorLoad, load), (Call, branch)], order="post")
    return BufferStore(stmt.buffer, value, [analyzer.simplify(index) for index in stmt.indices])
