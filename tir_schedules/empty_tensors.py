"""Tensors without elements on a GPU, whose driver refuses to start a kernel of no blocks."""

from __future__ import annotations

from functools import reduce

from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from .emit import int64
from .tir_nodes import collect, is_const, sequence, with_root_body


class EmptyOutput(ScheduleRule):
    """A function whose outputs have no element does nothing.

    Left to other rules (returns None): outputs of which some element is there for some value of a
    symbolic extent, and targets other than GPUs.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        if "gpu" not in target.keys or not isinstance(func, tirx.PrimFunc) or not is_empty(func):
            return None
        root = s_tir.SBlock([], [], [], "root", tirx.Evaluate(tirx.const(0, "int32")))
        return s_tir.Schedule(func.with_body(s_tir.SBlockRealize([], True, root)))


def is_empty(func: tirx.PrimFunc) -> bool:
    """Whether all that it writes are tensors known to have no element."""
    written = {store.buffer for store in collect(func.body, tirx.BufferStore)}
    outputs = [buffer for buffer in func.params if buffer in written]
    return bool(outputs) and all(
        any(is_const(extent, 0) for extent in buffer.shape) for buffer in outputs
    )


def start_no_empty_grids(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled function that starts each kernel only if it has blocks.

    By a loop of one iteration or none: TVM puts no barriers into what is behind a condition.
    """
    if not isinstance(func.body, s_tir.SBlockRealize):
        return func
    body = func.body.block.body
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    guarded = [_guarded(part) for part in parts]
    if all(new is old for new, old in zip(guarded, parts, strict=True)):
        return func
    return with_root_body(func, sequence(guarded), [])


def _guarded(kernel: tirx.Stmt) -> tirx.Stmt:
    counts = _symbolic_blocks(kernel) if isinstance(kernel, tirx.For | tirx.AttrStmt) else []
    if not counts:
        return kernel
    one = int64(1)
    times = reduce(tirx.min, (count.astype("int64") for count in counts), one)
    return tirx.For(tirx.Var("once", "int64"), int64(0), times, tirx.ForKind.SERIAL, kernel)


def _symbolic_blocks(kernel: tirx.Stmt) -> list[tirx.Expr]:
    """The extents of its grid that are not constants."""
    loops = [loop for loop in collect(kernel, tirx.For) if loop.thread_binding is not None]
    attributes = [a for a in collect(kernel, tirx.AttrStmt) if a.attr_key == "thread_extent"]
    axes = [(loop.thread_binding, loop.extent) for loop in loops]
    axes += [(attribute.node, attribute.value) for attribute in attributes]
    return [
        extent
        for axis, extent in axes
        if str(axis.thread_tag).startswith("blockIdx") and not isinstance(extent, tirx.IntImm)
    ]
