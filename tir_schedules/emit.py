"""Small pieces of loop nests, written with TVM's IR builder. All indices are int64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.sym import Analyzer
from tvm.tirx.script import builder as T

from .contraction import LANES, Contraction, Point

Index: TypeAlias = tirx.Expr | int
Loop: TypeAlias = Callable[[Index], AbstractContextManager[tirx.Var]]


def int64(value: Index) -> tirx.Expr:
    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def ceildiv(a: Index, b: int) -> tirx.Expr:
    return (int64(a) + (b - 1)) // b


def serial(extent: Index) -> AbstractContextManager[tirx.Var]:
    return T.serial(int64(0), int64(extent))


def parallel(extent: Index) -> AbstractContextManager[tirx.Var]:
    return T.parallel(int64(0), int64(extent))


def vectorized(extent: int = LANES) -> AbstractContextManager[tirx.Var]:
    return T.vectorized(int64(0), int64(extent))


def int32_variable(value: tirx.Expr) -> tirx.Expr:
    """An int32 that is worked out once.

    The variable is a uint32: `CompactBufferAllocation` evaluates the signed ones in front of an
    access to a register, those of earlier kernels too, at each.
    """
    return T.Cast("int32", T.Bind(T.Cast("uint32", value)))


@contextmanager
def when(condition: tirx.Expr | bool) -> Iterator[None]:
    """``if condition:`` around what is emitted inside; nothing where it is known to hold."""
    if isinstance(condition, bool) and condition:
        yield
        return
    with T.If(condition), T.Then():
        yield


def first_that_holds(
    branches: Sequence[tuple[tirx.Expr, Callable[[], None]]],
    otherwise: Callable[[], None],
    bound: bool = False,
) -> None:
    """``if … elif … else``, decided here where it can be.

    `bound` gives each condition a name until TVM has compacted buffers: it would work out anew at
    every access inside what all conditions around it tell, in kernels of many registers for
    seconds.
    """
    if not branches:
        otherwise()
        return
    (condition, emit), *rest = branches
    known = Analyzer().simplify(condition)
    if isinstance(known, tirx.IntImm):
        if known.value:
            emit()
        else:
            first_that_holds(rest, otherwise, bound)
        return
    with T.If(T.Bind(condition) if bound else condition):
        with T.Then():
            emit()
        with T.Else():
            first_that_holds(rest, otherwise, bound)


def registers(count: int, lanes: int = LANES) -> list[tirx.Buffer]:
    """`count` zeroed float32 vectors, each a buffer small enough for TVM to keep on the stack."""
    buffers = [T.alloc_buffer((int64(lanes),), "float32", scope="local") for _ in range(count)]
    for buffer in buffers:
        with vectorized(lanes) as lane:
            T.buffer_store(buffer, tirx.const(0, "float32"), [lane])
    return buffers


def scratch(*shape: Index) -> tirx.Buffer:
    """A float32 buffer from TVM's workspace pool of the running thread."""
    return T.alloc_buffer([int64(extent) for extent in shape], "float32")


def has_whole_vectors(product: Contraction, lanes: int = LANES) -> bool:
    """Whether the columns are known to be a multiple of `lanes`."""
    columns = product.column.dom.extent
    return isinstance(columns, tirx.IntImm) and columns.value % lanes == 0


def store_columns(
    product: Contraction,
    point: Point,
    first: tirx.Expr,
    values: tirx.Buffer,
    start: Sequence[Index] = (0,),
    lanes: int = LANES,
) -> None:
    """Send `lanes` values, from `start` on, through the epilogue to columns `first` and onwards.

    `first` is a multiple of `lanes`, and that divides LANES. Columns beyond the last are dropped.
    """
    for part in product.parts:
        begin, end = part or (0, 0)
        with when(part is None or tirx.all(first >= begin, first < end)):
            _store_part(product, point, first, values, start, lanes, part)


def _store_part(
    product: Contraction,
    point: Point,
    first: tirx.Expr,
    values: tirx.Buffer,
    start: Sequence[Index],
    lanes: int,
    part: tuple[int, int] | None,
) -> None:
    columns = product.column.dom.extent
    kept = {
        buffer: T.alloc_buffer((int64(lanes),), str(buffer.dtype), scope="local")
        for buffer in product.intermediates
    }

    def store(lane: tirx.Expr) -> None:
        def keep(buffer: tirx.Buffer, value: tirx.Expr) -> tirx.Expr:
            T.buffer_store(kept[buffer], value, [lane])
            return kept[buffer][lane]

        at = {**point, product.column.var: first + lane}
        value = values[(*start[:-1], start[-1] + lane)]
        product.finish(at, value, keep, T.buffer_store, part)

    def whole() -> None:
        with vectorized(lanes) as lane:
            store(lane)

    if has_whole_vectors(product, lanes):
        whole()
        return
    with T.If(first + lanes <= columns):
        with T.Then():
            whole()
        with T.Else(), serial(tirx.max(columns - first, int64(0))) as lane:
            store(lane)


def with_emitted_body(func: tirx.PrimFunc, emit: Callable[[], None]) -> tirx.PrimFunc:
    """`func` with its body replaced by what `emit` builds."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            emit()
        body = builder.get().body
    if not isinstance(body, s_tir.SBlockRealize):
        root = s_tir.SBlock([], [], [], "root", body)
        body = s_tir.SBlockRealize([], True, root)
    return func.with_body(body)
