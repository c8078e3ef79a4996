"""Recognise a matrix product in a PrimFunc, by its structure: the names of blocks do not matter.

Elementwise blocks before the product are inlined into its operands, those after it become stages of
the epilogue. Everything that is not understood makes `recognise` return None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..contraction import Axes, Contraction, Int4Weight, Int8Rows, loads
from ..int4_format.packed_order import unit_of
from ..tir_nodes import collect, is_const, substitute
from .epilogue import epilogue_stages
from .int4_matmul import DEQUANTIZE
from .int8_matmul import INT8_DOT, PACKED

_FLOATS = ("float32", "float16")
Producer = tuple[Sequence[tirx.Var], tirx.Expr]
"""Indices and value of an elementwise block: ``buffer[indices] = value``."""

_SPATIAL, _REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def recognise(func: tirx.PrimFunc, order: str = "vectors") -> Contraction | None:
    """The contraction that `func` computes, or None if it is something else.

    A product with an INT4 weight is something else, too, unless the weight is packed in `order`.
    """
    if not isinstance(func.body, s_tir.SBlockRealize):
        return None
    root = func.body.block
    blocks = _leaf_blocks(root.body)
    sums = [block for block in blocks if any(i.iter_type != _SPATIAL for i in block.iter_vars)]
    dots = [block for block in sums if INT8_DOT in block.annotations]
    products = [block for block in sums if INT8_DOT not in block.annotations]
    if len(products) != 1 or len(dots) > 1 or not _plain_axes(blocks):
        return None
    parts = _sort(blocks, products[0], frozenset(root.alloc_buffers))
    if parts is None:
        return None
    product = _assemble(products[0], parts, root.alloc_buffers)
    return product if product is not None and _has_order(product.rhs, order) else None


def _has_order(rhs: tirx.Expr | Int4Weight, order: str) -> bool:
    """Whether an operand, if it is INT4, is packed in `order`: words of a unit tell them apart."""
    return not isinstance(rhs, Int4Weight) or is_const(rhs.codes.shape[-1], unit_of(order).words)


def _leaf_blocks(body: tirx.Stmt) -> list[s_tir.SBlock]:
    """The blocks below `body`, if each is one store in a plain loop nest of its own."""
    blocks: list[s_tir.SBlock] = []
    for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        while isinstance(stmt, tirx.For):
            stmt = stmt.body
        if not isinstance(stmt, s_tir.SBlockRealize) or not is_const(stmt.predicate, 1):
            return []
        if not isinstance(stmt.block.body, tirx.BufferStore):
            return []
        blocks.append(stmt.block)
    return blocks


def _plain_axes(blocks: Sequence[s_tir.SBlock]) -> bool:
    """Whether all axes start at 0 and have one dtype."""
    axes = [axis for block in blocks for axis in block.iter_vars]
    return (
        all(is_const(axis.dom.min, 0) for axis in axes) and len({str(a.var.ty) for a in axes}) == 1
    )


@dataclass
class _Parts:
    """The blocks of a function, sorted by their part in the product."""

    producers: dict[tirx.Buffer, Producer] = field(default_factory=dict)
    dequantize: s_tir.SBlock | None = None
    dot: s_tir.SBlock | None = None
    product: tirx.Expr | None = None
    epilogue: list[tuple[s_tir.SBlock, tirx.Expr]] = field(default_factory=list)


def _sort(
    blocks: Sequence[s_tir.SBlock], product: s_tir.SBlock, temporaries: frozenset[tirx.Buffer]
) -> _Parts | None:
    """Each block with the producers it reads inlined; None if one has no part in the product."""
    parts, derived = _Parts(), {product.body.buffer}
    for block in blocks:
        value = _inline(block.body.value, parts.producers)
        read = {load.source for load in loads(value)}
        unknown = (read & temporaries) - derived
        if block.same_as(product):
            parts.product = value
            unknown -= {part.body.buffer for part in (parts.dequantize, parts.dot) if part}
        elif DEQUANTIZE in block.annotations:
            parts.dequantize = block
        elif INT8_DOT in block.annotations:
            parts.dot = block
            unknown -= {block.body.buffer}
        elif read & derived:
            derived.add(block.body.buffer)
            parts.epilogue.append((block, value))
        elif block.body.buffer in temporaries and _writes_each_element(block):
            parts.producers[block.body.buffer] = block.body.indices, value
        else:
            return None
        if unknown:
            return None
    return parts


def _assemble(
    block: s_tir.SBlock, parts: _Parts, temporaries: Sequence[tirx.Buffer]
) -> Contraction | None:
    if parts.dot is not None:
        axes = _int8_operands(block, parts.dot)
    else:
        operands = _operands(block, parts.product)
        axes = _classify(block, *operands) if operands is not None else None
    if axes is None:
        return None
    lhs, rhs, batch, rows, column, reduction = axes
    if parts.dequantize is not None:
        rhs = _int4_weight(parts.dequantize, rhs, column)
    total = tirx.Var("total", "float32")
    stages = epilogue_stages(block, column, total, parts.epilogue)
    if rhs is None or stages is None:
        return None
    intermediates = frozenset(temporaries)
    return Contraction(
        Axes(batch), Axes(rows), column, reduction, lhs, rhs, total, stages, intermediates
    )


def _writes_each_element(block: s_tir.SBlock) -> bool:
    """Whether each point of the axes is written to the element of the same indices."""
    written = [index for index in block.body.indices if isinstance(index, tirx.Var)]
    return len(block.iter_vars) == len(block.body.indices) == len(set(written))


def _inline(expr: tirx.Expr, producers: Mapping[tirx.Buffer, Producer]) -> tirx.Expr:
    """`expr` with what it reads of `producers` computed in place."""

    def compute(load: ir.TensorLoad) -> tirx.Expr:
        if load.source not in producers:
            return load
        indices, value = producers[load.source]
        return substitute(value, dict(zip(indices, load.indices, strict=True)))

    return tvm_ffi.structural_map(expr, (ir.TensorLoad, compute), order="post")


def _operands(block: s_tir.SBlock, value: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr] | None:
    """A and B of ``C = 0; C = C + A * B``, if they are float16 or float32."""
    init, update = block.init, block.body
    if not isinstance(init, tirx.BufferStore) or not is_const(init.value, 0):
        return None
    if not isinstance(value, tirx.Add) or not isinstance(value.b, tirx.Mul):
        return None
    accumulator = tirx.BufferLoad(update.buffer, update.indices)
    operands = value.b.a, value.b.b
    if not tvm_ffi.structural_equal(value.a, accumulator, map_free_vars=False):
        return None
    if any(str(operand.ty) not in _FLOATS or not loads(operand) for operand in operands):
        return None
    return operands if str(update.buffer.dtype) in _FLOATS else None


def _classify(block: s_tir.SBlock, a: tirx.Expr, b: tirx.Expr) -> tuple | None:
    """(lhs, rhs, batch, rows, column, reduction), where rhs is the operand of the last axis."""
    column = _column(block)
    reductions = [axis for axis in block.iter_vars if axis.iter_type == _REDUCE]
    in_a, in_b = set(collect(a, tirx.Var)), set(collect(b, tirx.Var))
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
    written = [index for index in block.body.indices if not is_const(index, 0)]
    if not all(isinstance(index, tirx.Var) and index in axes for index in written):
        return None
    spatial = {axis.var for axis in axes.values() if not is_const(axis.dom.extent, 1)}
    if len(set(written)) != len(written) or not spatial <= set(written) or not written:
        return None
    return axes[written[-1]] if isinstance(block.body.indices[-1], tirx.Var) else None


def _int4_weight(block: s_tir.SBlock, rhs: tirx.Expr, column: tirx.IterVar) -> Int4Weight | None:
    """The weight behind ``rhs[n, k]``, if `block` dequantizes it."""
    if not isinstance(rhs, ir.TensorLoad):
        return None
    if not rhs.source.same_as(block.body.buffer) or not rhs.indices[0].same_as(column.var):
        return None
    nibbles, scales = loads(block.body.value.a), loads(block.body.value.b)
    zero_point = nibbles[1].source if len(nibbles) == 2 else None
    group_size = int(block.annotations[DEQUANTIZE])
    return Int4Weight(nibbles[0].source, scales[0].source, zero_point, group_size)


def _int8_operands(block: s_tir.SBlock, dot: s_tir.SBlock) -> tuple | None:
    """What `_classify` gives, of the blocks of `int8_matmul`, whose form is known."""
    group_size = int(dot.annotations[INT8_DOT])
    _, codes, x = (load.source for load in loads(dot.body.value))
    _, _, *zero_point, x_sums, scale, x_scale = (load.source for load in loads(block.body.value))
    weight = Int4Weight(codes, scale, zero_point[0] if zero_point else None, group_size)
    *rows, column, group = block.iter_vars
    lhs = Int8Rows(x, x_scale, x_sums, PACKED in dot.annotations)
    return lhs, weight, (), tuple(rows), column, group
