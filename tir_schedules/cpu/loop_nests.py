"""What a schedule needs to know of a PrimFunc of plain loop nests: its blocks, and inlining."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize, Schedule, ScheduleError
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.sym import Analyzer
from tvm.tirx import BufferStore, Expr, For, ForKind, Stmt, Var

from ..tir_nodes import collect, is_const

# Largest expression, in nodes, that inlining may make of one read.
_INLINE_NODES = 400
# Stands for a symbolic extent in estimates of work.
_UNKNOWN_EXTENT = 1024
_CHEAP_CALLS = ("prim.if_then_else", "prim.likely", "tirx.fabs", "tirx.isnan", "tirx.reinterpret")
# TCallEffectKind: 0 an annotation, 1 pure; above that memory or state is involved.
_PURE = 1


@dataclass(frozen=True)
class Axis:
    """An axis of a block; `extent` is None where it is symbolic."""

    var: Var
    extent: int | None


@dataclass(eq=False)
class Block:
    """A leaf block, its axes without those of extent 1, spatial ones that lead and the reduced."""

    rv: SBlockRV
    stmt: SBlock
    spatial: list[Axis]
    reduced: list[Axis]
    loads: list[TensorLoad]
    stores: list[BufferStore]

    @property
    def work(self) -> int:
        """Iterations, with a guess for symbolic extents."""
        return prod(axis.extent or _UNKNOWN_EXTENT for axis in self.spatial + self.reduced)

    @property
    def is_empty(self) -> bool:
        """Whether an extent is 0."""
        return any(axis.extent == 0 for axis in self.spatial + self.reduced)

    @cached_property
    def reduces_columns(self) -> bool:
        """Whether the sum runs over a strided axis and another one is contiguous."""
        if not self.reduced or not self.spatial or len(self.stores) != 1 or not self.stmt.init:
            return False
        last = self.reduced[-1].var
        if all(_moves(load, last) in (None, 1) for load in self.loads):
            return False
        column = self.spatial[-1].var
        return _moves(self.stores[0], column) == 1 and all(
            _moves(load, column) in (None, 1) for load in self.loads
        )

    @property
    def row_axes(self) -> int:
        """Leading axes that may be rows; a sum over columns keeps its last axis for the vectors."""
        return len(self.spatial) - self.reduces_columns

    def reads(self, other: Block) -> bool:
        return bool(self.loads_of(other))

    def loads_of(self, other: Block) -> list[TensorLoad]:
        if other is self:
            return []
        return [
            load
            for load in self.loads
            if any(load.source.same_as(store.buffer) for store in other.stores)
        ]

    def shared_rows(self, consumer: Block) -> int:
        """Leading axes over which `consumer` reads exactly the element it is at."""
        count = 0
        for mine, theirs in zip(self.spatial, consumer.spatial, strict=False):
            place = _position(self.stores[0].indices, mine.var)
            loads = consumer.loads_of(self)
            if place is None or any(not load.indices[place].same_as(theirs.var) for load in loads):
                return count
            count += 1
        return count

    def row_loops(self, sch: Schedule, rows: int) -> list[LoopRV]:
        """The outermost loops up to that of the `rows`-th axis that is not of extent 1."""
        names = [axis.var for axis in self.stmt.iter_vars]
        last = next(i for i, v in enumerate(names) if v.same_as(self.spatial[rows - 1].var))
        return sch.get_loops(self.rv)[: last + 1]


def blocks_of(sch: Schedule) -> list[Block]:
    """The leaf blocks of a normalised schedule (one loop per axis), in program order."""
    return [_block(sch, rv) for rv in sch.get_child_blocks(_root(sch))]


def _root(sch: Schedule) -> SBlockRV:
    return sch.get_sblock(sch.mod["main"].body.block.name_hint)


def _block(sch: Schedule, rv: SBlockRV) -> Block:
    stmt = sch.get(rv)
    spatial: list[Axis] = []
    reduced: list[Axis] = []
    for axis in stmt.iter_vars:
        extent = axis.dom.extent
        size = extent.value if isinstance(extent, tirx.IntImm) else None
        if size == 1:
            continue
        if axis.iter_type != tirx.IterVar.DataPar:
            reduced.append(Axis(axis.var, size))
        elif not reduced:
            spatial.append(Axis(axis.var, size))
    loads = collect(stmt.body, TensorLoad)
    return Block(rv, stmt, spatial, reduced, loads, collect(stmt.body, BufferStore))


def is_plain_loop_nest(func: tirx.PrimFunc) -> bool:
    """Serial loops around blocks that write each element of their output from a pure value."""
    root = func.body
    if not isinstance(root, SBlockRealize) or "tirx.is_scheduled" in (func.attrs or {}):
        return False
    loops = collect(root.block.body, For)
    leaves = [node.block for node in collect(root.block.body, SBlockRealize)]
    plain = all(loop.kind == ForKind.SERIAL and not loop.annotations for loop in loops)
    kinds = {type(node).__name__ for node in collect(root.block.body, Stmt)}
    known = {"For", "SBlockRealize", "SBlock", "BufferStore", "SeqStmt", "Bind"}
    return plain and bool(leaves) and kinds <= known and all(map(_is_plain_leaf, leaves))


def _is_plain_leaf(block: SBlock) -> bool:
    kinds = {axis.iter_type for axis in block.iter_vars}
    if not kinds <= {tirx.IterVar.DataPar, tirx.IterVar.CommReduce}:
        return False
    is_reduction = tirx.IterVar.CommReduce in kinds
    if is_reduction != (block.init is not None) or collect(block.body, SBlockRealize):
        return False
    if block.alloc_buffers or block.match_buffers:
        return False
    stores = collect(block.body, BufferStore)
    pure = all(map(_is_pure, collect(block.body, Call)))
    return pure and all(_writes_once(block, store, is_reduction) for store in stores)


def _writes_once(block: SBlock, store: BufferStore, is_reduction: bool) -> bool:
    """Each spatial iteration writes an element of its own, and reads none that another writes."""
    spatial = [a for a in block.iter_vars if a.iter_type == tirx.IterVar.DataPar]
    free = [a for a in spatial if _position(store.indices, a.var) is None]
    if any(not is_const(axis.dom.extent, 1) for axis in free):
        return False
    own = [x for x in collect(block.body, TensorLoad) if x.source.same_as(store.buffer)]
    if not is_reduction:
        return not own
    return all(tvm_ffi.structural_equal(list(x.indices), list(store.indices)) for x in own)


def inline_producers(sch: Schedule) -> None:
    """Inline every injective block whose value is cheap, or read once by one reader."""
    done: set[str] = set()
    while True:
        blocks = blocks_of(sch)
        todo = [b for b in blocks[:-1] if b.stmt.name_hint not in done]
        if not todo:
            return
        done.add(todo[0].stmt.name_hint)
        if _is_worth_inlining(todo[0], [b for b in blocks if b.reads(todo[0])]):
            attempt(sch.compute_inline, todo[0].rv)


def _is_worth_inlining(block: Block, consumers: list[Block]) -> bool:
    if block.reduced or len(block.stores) != 1 or not consumers:
        return False
    value = block.stores[0].value
    reads = [(load, consumer) for consumer in consumers for load in consumer.loads_of(block)]
    one_to_one = all(_visits_each_once(load, consumer) for load, consumer in reads)
    if _is_expensive(value):
        return one_to_one and len(reads) == 1
    if isinstance(value, TensorLoad):
        return True
    if not one_to_one and any(consumer.reduced for consumer in consumers):
        return False
    return _size(value) * len(reads) <= _INLINE_NODES


def _visits_each_once(load: TensorLoad, consumer: Block) -> bool:
    axes = consumer.spatial + consumer.reduced
    return all(_position(load.indices, axis.var) is not None for axis in axes)


def _is_expensive(value: Expr) -> bool:
    calls = [call for call in collect(value, Call) if _name(call) not in _CHEAP_CALLS]
    return bool(calls or collect(value, tirx.Div))


def _size(value: Expr) -> int:
    return len(collect(value, Expr))


def _moves(access: TensorLoad | BufferStore, var: Var) -> int | None:
    """By how much one step of `var` moves the last index: None not at all, 0 if others move too."""
    moving = [index for index in access.indices if any(x.same_as(var) for x in collect(index, Var))]
    if not moving:
        return None
    if len(moving) > 1 or not moving[0].same_as(access.indices[-1]):
        return 0
    one = tirx.const(1, var.ty.dtype)
    moved = tvm_ffi.structural_map(moving[0], (Var, lambda x: x + one if x.same_as(var) else x))
    step = Analyzer().simplify(moved - moving[0])
    return step.value if isinstance(step, tirx.IntImm) else 0


def _position(indices: list[Expr], var: Var) -> int | None:
    return next((i for i, index in enumerate(indices) if index.same_as(var)), None)


def _is_pure(call: Call) -> bool:
    effect = call.op.get_attr("TCallEffectKind") if isinstance(call.op, Op) else None
    return effect is not None and int(effect) <= _PURE and _name(call) != "tirx.address_of"


def _name(call: Call) -> str:
    return getattr(call.op, "name", "")


def attempt(step: Callable[..., object], *args: object) -> bool:
    """Whether the schedule allowed `step(*args)`; it is left as it was where not."""
    try:
        step(*args)
    except ScheduleError:
        return False
    return True
