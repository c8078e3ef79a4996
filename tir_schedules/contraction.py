"""Recognise a matrix product in a PrimFunc, by its structure.

    out[b…, m…, n] = epilogue(sum over k of lhs[b…, m…, k] * rhs[b…, n, k])

`b` are the axes of both operands (batched products), `m` those of the left one alone (fused into
rows), `n` is the last axis of the product, `k` is summed over. The right operand may be INT4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import tvm_ffi
from tvm import ir, s_tir, tirx

from .int4_matmul import DEQUANTIZE

LANES = 16
"""Columns computed side by side. LLVM splits a vector of 16 into what the target has."""

Point = Mapping[tirx.Var, tirx.Expr]
_FLOATS = ("float32", "float16")
_SPATIAL, _REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def split(index: tirx.Expr, extent: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Quotient and remainder of an index that is never negative.

    Truncating division: TVM lowers a floor division by a symbolic extent to let-expressions that
    its own simplifier then rejects.
    """
    return tirx.truncdiv(index, extent), tirx.truncmod(index, extent)


@dataclass(frozen=True)
class Axes:
    """Axes fused into one, the last running fastest."""

    iters: tuple[tirx.IterVar, ...]

    @property
    def extent(self) -> tirx.Expr:
        return prod((axis.dom.extent for axis in self.iters), start=tirx.IntImm("int64", 1))

    def at(self, index: tirx.Expr) -> dict[tirx.Var, tirx.Expr]:
        """The value of each axis at a position along the fused one."""
        point = {}
        for axis in reversed(self.iters[1:]):
            index, point[axis.var] = split(index, axis.dom.extent)
        return point | {axis.var: index for axis in self.iters[:1]}

    def index(self, point: Point) -> tirx.Expr:
        """The inverse of `at`."""
        position = tirx.IntImm("int64", 0)
        for axis in self.iters:
            position = position * axis.dom.extent + point[axis.var]
        return position


@dataclass(frozen=True)
class Int4Weight:
    """The buffers that a block "dequantize" reads, see `packing`."""

    codes: tirx.Buffer
    scale: tirx.Buffer
    zero_point: tirx.Buffer | None
    group_size: int


@dataclass(frozen=True)
class Stage:
    """``buffer[indices] = value`` at every point of some axes."""

    axes: tuple[tirx.IterVar, ...]
    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    value: tirx.Expr

    @classmethod
    def of(cls, block: s_tir.SBlock, producers: Mapping[tirx.Buffer, Stage]) -> Stage:
        """The one store of a block, with what `producers` compute inlined into it."""
        store = block.body
        value = _inline(store.value, producers)
        return cls(tuple(block.iter_vars), store.buffer, tuple(store.indices), value)


@dataclass(frozen=True)
class Contraction:
    """What `recognise` found. Operands are expressions over the variables of the axes."""

    batch: Axes
    rows: Axes
    column: tirx.IterVar
    reduction: tirx.IterVar
    lhs: tirx.Expr
    rhs: tirx.Expr | Int4Weight
    product: Stage
    epilogue: tuple[Stage, ...]
    temporaries: frozenset[tirx.Buffer]

    def left(self, point: Point) -> tirx.Expr:
        return _substitute(self.lhs, point).astype("float32")

    def right(self, point: Point) -> tirx.Expr:
        return _substitute(self.rhs, point).astype("float32")

    @property
    def left_is_plain(self) -> bool:
        """Whether the left operand is float32 in memory, in rows of k."""
        load = self.lhs
        return (
            isinstance(load, ir.TensorLoad)
            and str(load.ty) == "float32"
            and self.reduction.var.same_as(load.indices[-1])
        )

    @property
    def right_runs_along_columns(self) -> bool:
        """Whether neighbours in memory of the right operand are columns (else they run along k)."""
        return any(self.column.var.same_as(load.indices[-1]) for load in _loads(self.rhs))

    @property
    def intermediates(self) -> list[tirx.Buffer]:
        """The buffers of the stages, but for the outputs."""
        buffers = [stage.buffer for stage in (self.product, *self.epilogue)]
        return [buffer for buffer in buffers if buffer in self.temporaries]

    def finish(
        self,
        point: Point,
        value: tirx.Expr,
        keep: Callable[[tirx.Buffer, tirx.Expr], tirx.Expr],
        store: Callable[[tirx.Buffer, tirx.Expr, Sequence[tirx.Expr]], None],
    ) -> bool:
        """Send one element of the product through the epilogue.

        `keep` remembers the value of an intermediate buffer and returns how to read it, `store`
        writes an output. False if the epilogue is not elementwise over the product.
        """
        done: dict[tirx.Buffer, tuple[list[tirx.Expr], tirx.Expr]] = {}
        for stage in (self.product, *self.epilogue):
            at = point if stage is self.product else _solve(stage, done)
            if at is None:
                return False
            if stage is self.product:
                value = value.astype(str(stage.buffer.dtype))
            else:
                value = _replace_loads(_substitute(stage.value, at), done)
            indices = [_substitute(index, at) for index in stage.indices]
            if stage.buffer in self.temporaries:
                value = keep(stage.buffer, value)
            else:
                store(stage.buffer, value, indices)
            done[stage.buffer] = indices, value
        return True


def recognise(func: tirx.PrimFunc) -> Contraction | None:
    """The contraction that `func` computes, or None if it is something else."""
    root = func.body.block if isinstance(func.body, s_tir.SBlockRealize) else None
    blocks = _leaf_blocks(root.body) if root is not None else []
    temporaries = frozenset(root.alloc_buffers) if blocks else frozenset()
    sums = [block for block in blocks if _types(block) - {_SPATIAL}]
    if len(sums) != 1 or len({str(i.var.ty) for block in blocks for i in block.iter_vars}) != 1:
        return None
    stages = _stages(blocks, sums[0], temporaries)
    axes = _classify(sums[0], *stages.operands) if stages else None
    if stages is None or axes is None:
        return None
    lhs, rhs, batch, rows, column, reduction = axes
    weight = _int4_weight(stages.dequantize, rhs, column)
    if stages.dequantize is not None and weight is None:
        return None
    found = Contraction(
        Axes(batch),
        Axes(rows),
        column,
        reduction,
        lhs,
        weight or rhs,
        stages.product,
        tuple(stages.epilogue),
        temporaries,
    )
    point = {axis.var: axis.var for axis in stages.product.axes}
    zero = tirx.const(0, "float32")
    return found if found.finish(point, zero, lambda _, x: x, lambda *_: None) else None


@dataclass
class _Stages:
    """The blocks of a function, sorted by their part in the product."""

    product: Stage
    operands: tuple[tirx.Expr, tirx.Expr]
    dequantize: s_tir.SBlock | None
    epilogue: list[Stage]


def _stages(
    blocks: Sequence[s_tir.SBlock], product: s_tir.SBlock, temporaries: frozenset[tirx.Buffer]
) -> _Stages | None:
    producers: dict[tirx.Buffer, Stage] = {}
    dequantize, found, derived = None, None, {product.body.buffer}
    for block in blocks:
        stage = Stage.of(block, producers)
        known = derived | (
            {dequantize.body.buffer} if block.same_as(product) and dequantize else set()
        )
        if any(load.source in temporaries - known for load in _loads(stage.value)):
            return None
        if block.same_as(product):
            operands = _operands(block, stage.value)
            if operands is None:
                return None
            found = _Stages(stage, operands, dequantize, [])
        elif DEQUANTIZE in block.annotations:
            dequantize = block
        elif any(load.source in derived for load in _loads(stage.value)):
            derived.add(stage.buffer)
            found.epilogue.append(stage)
        elif stage.buffer in temporaries and _is_map(stage):
            producers[stage.buffer] = stage
        else:
            return None
    return found


def _is_map(stage: Stage) -> bool:
    """Whether each point of the axes is written to the element of the same indices."""
    written = [index for index in stage.indices if isinstance(index, tirx.Var)]
    return len(stage.axes) == len(stage.indices) == len(set(written))


def _inline(expr: tirx.Expr, producers: Mapping[tirx.Buffer, Stage]) -> tirx.Expr:
    def replace(load: ir.TensorLoad) -> tirx.Expr:
        stage = producers.get(load.source)
        if stage is None:
            return load
        return _substitute(stage.value, dict(zip(stage.indices, load.indices, strict=True)))

    return tvm_ffi.structural_map(expr, (ir.TensorLoad, replace), order="post")


def _leaf_blocks(body: tirx.Stmt) -> list[s_tir.SBlock]:
    """The blocks below `body`, if each is one store in a plain loop nest of its own."""
    blocks: list[s_tir.SBlock] = []
    for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        while isinstance(stmt, tirx.For):
            stmt = stmt.body
        if not isinstance(stmt, s_tir.SBlockRealize) or not _is(stmt.predicate, 1):
            return []
        if not isinstance(stmt.block.body, tirx.BufferStore):
            return []
        blocks.append(stmt.block)
    return blocks


def _operands(block: s_tir.SBlock, value: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr] | None:
    """A and B of ``C = 0; C = C + A * B``, if they are float16 or float32."""
    init, update = block.init, block.body
    if not isinstance(init, tirx.BufferStore) or not _is(init.value, 0):
        return None
    if not isinstance(value, tirx.Add) or not isinstance(value.b, tirx.Mul):
        return None
    accumulator = tirx.BufferLoad(update.buffer, update.indices)
    operands = value.b.a, value.b.b
    if not tvm_ffi.structural_equal(value.a, accumulator, map_free_vars=False):
        return None
    if any(str(operand.ty) not in _FLOATS or not _loads(operand) for operand in operands):
        return None
    return operands if str(update.buffer.dtype) in _FLOATS else None


def _classify(block: s_tir.SBlock, a: tirx.Expr, b: tirx.Expr) -> tuple | None:
    """(lhs, rhs, batch, rows, column, reduction), where rhs is the operand of the last axis."""
    column = _column(block)
    reductions = [axis for axis in block.iter_vars if axis.iter_type == _REDUCE]
    in_a, in_b = _variables(a), _variables(b)
    if column is None or len(reductions) != 1 or (column.var in in_a) == (column.var in in_b):
        return None
    lhs, rhs, in_l, in_r = (a, b, in_a, in_b) if column.var in in_b else (b, a, in_b, in_a)
    if reductions[0].var not in in_l & in_r:
        return None
    spatial = [axis for axis in block.iter_vars if axis.iter_type == _SPATIAL]
    rows = tuple(axis for axis in spatial if axis.var in in_l and axis.var not in in_r)
    others = (column, *rows)
    batch = tuple(axis for axis in spatial if not any(axis.same_as(other) for other in others))
    return lhs, rhs, batch, rows, column, reductions[0]


def _column(block: s_tir.SBlock) -> tirx.IterVar | None:
    """The axis of the last index of the store, if its indices are distinct axes or zeros."""
    axes = {axis.var: axis for axis in block.iter_vars if axis.iter_type == _SPATIAL}
    written = [index for index in block.body.indices if not _is(index, 0)]
    if not all(isinstance(index, tirx.Var) and index in axes for index in written):
        return None
    spatial = {axis.var for axis in axes.values() if not _is(axis.dom.extent, 1)}
    if len(set(written)) != len(written) or not spatial <= set(written) or not written:
        return None
    return axes[written[-1]] if isinstance(block.body.indices[-1], tirx.Var) else None


def _int4_weight(
    block: s_tir.SBlock | None, rhs: tirx.Expr, column: tirx.IterVar
) -> Int4Weight | None:
    """The weight behind ``rhs[n, k]``, if `block` dequantizes it."""
    if block is None or not isinstance(rhs, ir.TensorLoad):
        return None
    if not rhs.source.same_as(block.body.buffer) or not rhs.indices[0].same_as(column.var):
        return None
    nibbles, scales = _loads(block.body.value.a), _loads(block.body.value.b)
    zero_point = nibbles[1].source if len(nibbles) == 2 else None
    group_size = int(block.annotations[DEQUANTIZE])
    weight = Int4Weight(nibbles[0].source, scales[0].source, zero_point, group_size)
    return weight if _is(weight.codes.shape[-1], LANES) else None


def _solve(stage: Stage, done: Mapping[tirx.Buffer, tuple]) -> dict | None:
    """The point of `stage` that reads the elements in `done`; None if there is not just one."""
    point: dict[tirx.Var, tirx.Expr] = {}
    axes = {axis.var for axis in stage.axes}
    loads = [load for load in _loads(stage.value) if load.source in done]
    for load in loads:
        for index, at in zip(load.indices, done[load.source][0], strict=True):
            if isinstance(index, tirx.Var) and index in axes:
                point.setdefault(index, at)
    for axis in stage.axes:
        if _is(axis.dom.extent, 1):
            point.setdefault(axis.var, axis.dom.min)
    if not all(_same(load.indices, done[load.source][0], point) for load in loads):
        return None
    return point if len(point) == len(axes) else None


def _same(indices: Sequence[tirx.Expr], at: Sequence[tirx.Expr], point: Point) -> bool:
    found = [_substitute(index, point) for index in indices]
    return tvm_ffi.structural_equal(found, list(at), map_free_vars=False)


def _replace_loads(expr: tirx.Expr, done: Mapping[tirx.Buffer, tuple]) -> tirx.Expr:
    def replace(load: ir.TensorLoad) -> tirx.Expr:
        return done[load.source][1] if load.source in done else load

    return tvm_ffi.structural_map(expr, (ir.TensorLoad, replace), order="post")


def _substitute(expr: tirx.Expr, point: Point) -> tirx.Expr:
    if isinstance(expr, tirx.Var):
        return point.get(expr, expr)
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: point.get(var, var)), order="post")


def _loads(expr: tirx.Expr) -> list[ir.TensorLoad]:
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(expr, (ir.TensorLoad, found.append), order="post")
    return found


def _variables(expr: tirx.Expr) -> set[tirx.Var]:
    found: set[tirx.Var] = set()
    tvm_ffi.structural_walk(expr, (tirx.Var, found.add), order="post")
    return found


def _types(block: s_tir.SBlock) -> set[int]:
    return {axis.iter_type for axis in block.iter_vars}


def _is(expr: tirx.Expr, value: int) -> bool:
    return isinstance(expr, tirx.IntImm | tirx.FloatImm) and expr.value == value
