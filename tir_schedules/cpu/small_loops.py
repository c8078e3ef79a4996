"""Run a parallel loop of symbolic extent on one thread when there is little to do."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock
from tvm.sym import Analyzer
from tvm.tirx import BufferStore, Expr, For, ForKind, IfThenElse, SeqStmt, Stmt, Var

from ..tir_nodes import sequence, substitute, with_root_body


def run_small_loops_serially(func: tirx.PrimFunc, work: int) -> tirx.PrimFunc:
    """`func` with each outermost parallel loop guarded by the number of elements it computes.

    ``parallel for i`` becomes ``if extent * elements < work: for i; else: parallel for i`` where
    that number is not a constant. The serial copy has buffers of its own: a buffer that both
    copies used would be allocated outside the parallel loop and shared by its threads.

    Parameters
    ----------
    func : PrimFunc
        In S-TIR form, with no loops inside blocks other than the root.
    work : int
        Elements from which a parallel region, which costs 1 to 3 us, pays.
    """
    root = func.body.block
    stmts = list(root.body.seq) if isinstance(root.body, SeqStmt) else [root.body]
    copies: list[tirx.Buffer] = []
    for i, stmt in enumerate(stmts):
        if isinstance(stmt, For) and stmt.kind == ForKind.PARALLEL:
            others = stmts[:i] + stmts[i + 1 :]
            stmts[i] = _guarded(stmt, _private(stmt, others, root.alloc_buffers), work, copies)
    return with_root_body(func, sequence(stmts), copies)


def _guarded(
    loop: For, private: Sequence[tirx.Buffer], work: int, copies: list[tirx.Buffer]
) -> Stmt:
    elements = Analyzer().simplify(_elements(loop))
    if isinstance(elements, tirx.IntImm):
        return loop
    renamed: dict[Var, Var] = {buffer: _copy(buffer) for buffer in private}
    copies += renamed.values()
    for var in _defined(loop):
        renamed[var] = Var(var.name, var.ty.dtype)
    serial = substitute(loop, renamed)
    serial = For(serial.loop_var, serial.min, serial.extent, ForKind.SERIAL, serial.body)
    return IfThenElse(elements < tirx.const(work, elements.ty.dtype), serial, loop)


def _elements(stmt: Stmt) -> Expr | int:
    """Stores executed."""
    if isinstance(stmt, SeqStmt):
        return sum((_elements(child) for child in stmt.seq), start=0)
    if isinstance(stmt, For):
        return stmt.extent * _elements(stmt.body)
    return 1


def _private(
    loop: For, others: Sequence[Stmt], buffers: Sequence[tirx.Buffer]
) -> list[tirx.Buffer]:
    """The buffers that only `loop` uses."""
    inside, outside = _used(loop), set().union(*map(_used, others))
    return [buffer for buffer in buffers if buffer in inside and buffer not in outside]


def _used(stmt: Stmt) -> set[Var]:
    used: set[Var] = set()
    stores = (BufferStore, lambda store: used.add(store.buffer))
    tvm_ffi.structural_walk(stmt, [stores, (Var, used.add)])
    return used


def _defined(loop: For) -> list[Var]:
    defined: list[Var] = []
    tvm_ffi.structural_walk(
        loop,
        [
            (For, lambda node: defined.append(node.loop_var)),
            ((tirx.Let, tirx.Bind), lambda node: defined.append(node.var)),
            (SBlock, lambda node: defined.extend(axis.var for axis in node.iter_vars)),
        ],
    )
    return defined


def _copy(buffer: tirx.Buffer) -> tirx.Buffer:
    return tirx.decl_buffer(buffer.shape, buffer.dtype, f"{buffer.name}_serial")
