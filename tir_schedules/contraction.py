"""What a kernel needs to know of a matrix product, as `recognise` finds it in a PrimFunc.

    out[b…, m…, n] = epilogue(sum over k of lhs[b…, m…, k] * rhs[b…, n, k])

`b` are the axes of both operands (batched products), `m` those of the left one alone (fused into
rows), `n` is the last axis of the product, `k` is summed over. The right operand may be INT4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import tvm_ffi
from tvm import ir, tirx

from .tir_nodes import collect, is_const, substitute

LANES = 16
"""Columns computed side by side. LLVM splits a vector of 16 into what the target has."""

Point = Mapping[tirx.Var, tirx.Expr]


def split(index: tirx.Expr, extent: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Quotient and remainder of an index that is never negative.

    Truncating division: TVM lowers a floor division by a symbolic extent to let-expressions that
    its own simplifier then rejects. Of an extent of 0, which nothing runs over, either is 0.
    """
    if is_const(extent, 0):
        return extent, extent
    return tirx.truncdiv(index, extent), tirx.truncmod(index, extent)


def unflatten(index: tirx.Expr, extents: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    """The indices, the last running fastest, of a position that is never negative."""
    indices: list[tirx.Expr] = []
    for extent in reversed(extents[1:]):
        index, inner = split(index, extent)
        indices.insert(0, inner)
    return [index, *indices][: len(extents)]


@dataclass(frozen=True)
class Axes:
    """Axes fused into one, the last running fastest."""

    iters: tuple[tirx.IterVar, ...]

    @property
    def extent(self) -> tirx.Expr:
        return prod((axis.dom.extent for axis in self.iters), start=tirx.IntImm("int64", 1))

    def at(self, index: tirx.Expr) -> dict[tirx.Var, tirx.Expr]:
        """The value of each axis at a position along the fused one."""
        indices = self.indices(index)
        return {axis.var: at for axis, at in zip(self.iters, indices, strict=True)}

    def indices(self, index: tirx.Expr) -> list[tirx.Expr]:
        """`at`, in the order of the axes."""
        return unflatten(index, [axis.dom.extent for axis in self.iters])

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
class Int8Rows:
    """The buffers of quantized activations, see `int8_matmul`; packed codes are of 4 bits."""

    codes: tirx.Buffer
    scale: tirx.Buffer
    sums: tirx.Buffer
    is_packed: bool = False

    @property
    def groups_per_scale(self) -> int:
        """Groups of the weight, each with a sum, that share a scale."""
        return int(self.sums.shape[-1]) // int(self.scale.shape[-1])


@dataclass(frozen=True)
class Stage:
    """``buffer[indices] = value``, over the axes of the product.

    It covers the `columns` from the first to before the second, multiples of LANES; all if None.
    """

    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    value: tirx.Expr
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Contraction:
    """A matrix product; operands and stages are expressions over the variables of its axes.

    Attributes
    ----------
    batch, rows, column, reduction
        The axes b, m, n and k.
    lhs, rhs
        The operands.
    total : Var
        Stands for the finished sum, float32, in the first of `stages`.
    stages : tuple of Stage
        The product and its epilogue, in order. A stage may read the buffers of earlier ones, at
        the element they have just written.
    temporaries : frozenset of Buffer
        The buffers of stages that are no outputs.
    """

    batch: Axes
    rows: Axes
    column: tirx.IterVar
    reduction: tirx.IterVar
    lhs: tirx.Expr | Int8Rows
    rhs: tirx.Expr | Int4Weight
    total: tirx.Var
    stages: tuple[Stage, ...]
    temporaries: frozenset[tirx.Buffer]

    def left(self, point: Point) -> tirx.Expr:
        """An element of the left operand, in float32."""
        return substitute(self.lhs, point).astype("float32")

    def right(self, point: Point) -> tirx.Expr:
        """An element of the right operand, if it is not INT4, in float32."""
        return substitute(self.rhs, point).astype("float32")

    @property
    def left_dtype(self) -> str:
        """The dtype of the left operand before it is made float32."""
        assert not isinstance(self.lhs, Int8Rows)
        return str(self.lhs.value.ty if isinstance(self.lhs, tirx.Cast) else self.lhs.ty)

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
        return any(self.column.var.same_as(load.indices[-1]) for load in loads(self.rhs))

    @property
    def padded_k(self) -> tirx.Expr:
        """Extent of k, for INT4 with the padding of the last group."""
        if isinstance(self.rhs, Int4Weight):
            return self.rhs.scale.shape[1] * self.rhs.group_size
        return self.reduction.dom.extent

    @property
    def parts(self) -> list[tuple[int, int] | None]:
        """The different columns that outputs cover."""
        outputs = [stage for stage in self.stages if stage.buffer not in self.temporaries]
        return list(dict.fromkeys(stage.columns for stage in outputs))

    @property
    def intermediates(self) -> list[tirx.Buffer]:
        """The buffers of the stages, but for the outputs."""
        return [stage.buffer for stage in self.stages if stage.buffer in self.temporaries]

    def finish(
        self,
        point: Point,
        total: tirx.Expr,
        keep: Callable[[tirx.Buffer, tirx.Expr], tirx.Expr],
        store: Callable[[tirx.Buffer, tirx.Expr, Sequence[tirx.Expr]], None],
        part: tuple[int, int] | None = None,
    ) -> None:
        """Send one finished sum through the stages that cover all columns or those of `part`.

        `keep` remembers the value of an intermediate buffer and returns how to read it, `store`
        writes an output.
        """
        at = {**point, self.total: total}
        written: dict[tirx.Buffer, tirx.Expr] = {}
        for stage in self.stages:
            if stage.columns not in (None, part):
                continue
            value = replace_loads(substitute(stage.value, at), written)
            if stage.buffer in self.temporaries:
                written[stage.buffer] = keep(stage.buffer, value)
            else:
                store(stage.buffer, value, [substitute(index, at) for index in stage.indices])
                written[stage.buffer] = value


def replace_loads(expr: tirx.Expr, values: Mapping[tirx.Buffer, tirx.Expr]) -> tirx.Expr:
    """`expr` with every load of the buffers in `values` replaced."""

    def replace(load: ir.TensorLoad) -> tirx.Expr:
        return values.get(load.source, load)

    return tvm_ffi.structural_map(expr, (ir.TensorLoad, replace), order="post")


def loads(expr: tirx.Expr) -> list[ir.TensorLoad]:
    """The loads in `expr`, from left to right."""
    return collect(expr, ir.TensorLoad)
