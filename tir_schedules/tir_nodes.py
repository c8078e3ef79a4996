"""Small queries and rewrites of TIR that several schedules share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import Expr, For, ForKind, SeqStmt, Stmt, Var


def collect(node: Stmt | Expr, kind: type) -> list[Any]:
    """Every node of that kind below `node`, itself included; inner ones first."""
    found: list[Any] = []
    tvm_ffi.structural_walk(node, (kind, found.append))
    return found


def substitute(node: Any, values: Mapping[Var, Expr]) -> Any:
    """`node` with variables replaced, also where they are defined."""

    def replace(var: Var) -> Expr:
        return values.get(var, var)

    return tvm_ffi.structural_map(node, (Var, replace), order="post")


def uses(node: Stmt | Expr, var: Var) -> bool:
    return any(other.same_as(var) for other in collect(node, Var))


def reads(node: Expr, buffer: tirx.Buffer) -> bool:
    return any(load.source.same_as(buffer) for load in collect(node, TensorLoad))


def is_branch(call: Call) -> bool:
    """Whether only one of the two values of this if_then_else may be computed."""
    return getattr(call.op, "name", "") == "prim.if_then_else"


def is_const(value: Expr, number: int) -> bool:
    return isinstance(value, tirx.IntImm | tirx.FloatImm) and value.value == number


def integer(value: int, like: Var) -> Expr:
    """A constant of the type of `like`."""
    return tirx.const(value, like.ty.dtype)


def perfect_nest(loop: For) -> tuple[list[For], Stmt]:
    """Loops that contain nothing but the next, and what the last one contains."""
    loops: list[For] = []
    stmt: Stmt = loop
    while isinstance(stmt, For):
        loops.append(stmt)
        stmt = stmt.body
    return loops, stmt


def nest(loops: Sequence[For], body: Stmt) -> Stmt:
    for loop in reversed(loops):
        body = For(loop.loop_var, loop.min, loop.extent, loop.kind, body)
    return body


def with_body(loop: For, body: Stmt) -> For:
    return For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations
    )


def vector_loop(lane: Var, width: int, body: Stmt) -> Stmt:
    """The loop over the lanes; `lane` is renamed, so it may serve in several loops."""
    var = Var("lane", lane.ty.dtype)
    kind = ForKind.VECTORIZED if width > 1 else ForKind.SERIAL
    return For(var, integer(0, lane), integer(width, lane), kind, substitute(body, {lane: var}))


def serial_loop(old: Var, first: Expr, extent: Expr, body: Stmt) -> For:
    """for old in first...first + extent, as a loop from zero with a variable of its own."""
    var = Var(old.name, old.ty.dtype)
    index = var if is_const(first, 0) else first + var
    return For(var, integer(0, old), extent, ForKind.SERIAL, substitute(body, {old: index}))


def sequence(stmts: Sequence[Stmt | None]) -> Stmt:
    """The statements that are not None, one after the other."""
    present = [stmt for stmt in stmts if stmt is not None]
    return present[0] if len(present) == 1 else SeqStmt(present)


def with_root_body(
    func: tirx.PrimFunc, body: Stmt, buffers: Sequence[tirx.Buffer]
) -> tirx.PrimFunc:
    """`func`, in S-TIR form, with another body of its root block and more buffers in it."""
    realize, root = func.body, func.body.block
    block = SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init,
        [*root.alloc_buffers, *buffers], root.match_buffers, root.annotations,
    )  # fmt: skip
    return func.with_body(SBlockRealize(realize.iter_values, realize.predicate, block))
