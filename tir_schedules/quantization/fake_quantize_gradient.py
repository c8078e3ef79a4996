"""`fake_quantize_grad` for llvm in one pass over gy and x, where groups are runs of elements.

TE cannot say it: dx and the sums would be loops of their own, which read both tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target
from tvm.tirx.script import builder as T

from ..emit import int64, parallel, serial, vectorized, with_emitted_body
from .affine import AffineFormat, Element, stored_scale
from .fake_quantize import FORMAT_ATTR, scale_term, x_partial, zero_point_term

Expr: TypeAlias = Any
Index: TypeAlias = Sequence[Expr]
_LANES = 16


class FakeQuantizeGradient(ScheduleRule):
    """Groups along the last axis, one scale, or one scale per index of the first axis::

        parallel for rows:
            for groups in the row:
                for vectors in the group:
                    dx[v] = select(inside, gy, 0)
                    total[0:16] += gy * (y - select(inside, x, 0))      in float64
                ds[row, group] = fold(total) / scale

    With one scale each index of the first axis leaves a partial sum. Other granularities, tensors
    of rank 0 and 1, and other targets are left to the rules that follow (returns None).
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> Schedule | None:
        if target.kind.name != "llvm" or not isinstance(func, tirx.PrimFunc):
            return None
        if FORMAT_ATTR not in func.attrs:
            return None
        form = AffineFormat.from_attributes(func.attrs[FORMAT_ATTR])
        kernel = _Gradient(form, list(func.params))
        if len(kernel.shape) < 2:
            return None
        if kernel.has_groups_in_rows:
            return Schedule(with_emitted_body(func, kernel.emit_groups))
        if kernel.has_whole_rows:
            return Schedule(with_emitted_body(func, kernel.emit_rows))
        return None


class _Gradient:
    """The kernel, of buffers gy, x, scale[, zero_point], dx, ds[, dz]."""

    def __init__(self, form: AffineFormat, buffers: Sequence[tirx.Buffer]) -> None:
        self.form = form
        self.gy, self.x, self.scale, *rest = buffers
        self.zero_point = rest.pop(0) if len(rest) > 2 else None
        self.dx, *self.sums = rest
        self.shape = [int64(extent) for extent in self.x.shape]
        self.terms = (scale_term, zero_point_term)[: len(self.sums)]

    @property
    def has_groups_in_rows(self) -> bool:
        return self.form.group_size is not None and self._axis == len(self.shape) - 1

    @property
    def has_whole_rows(self) -> bool:
        return self.form.group_size is None and (not self.scale.shape or self._axis == 0)

    @property
    def _axis(self) -> int:
        return self.form.axis % len(self.shape)

    def emit_groups(self) -> None:
        columns = self.shape[-1]
        size = columns if self.form.group_size == -1 else int64(self.form.group_size)
        groups = self.form.group_count(columns)
        with parallel(prod(self.shape[:-1])) as task, serial(groups) as group:
            row = _unravel(task, self.shape[:-1])
            totals = _Totals(len(self.sums))
            first = group * size
            self.run(totals, row, [*row, group], first, tirx.min(size, columns - first))
            self.finish(totals.folded(), [*row, group])

    def emit_rows(self) -> None:
        """Per index of the first axis; with one scale these are partial sums."""
        heads, *middle, columns = self.shape
        partial = None
        if not self.scale.shape:
            partial = [T.alloc_buffer((heads,), "float64") for _ in self.sums]
        with parallel(heads) as head:
            index = [] if partial else [head]
            totals = _Totals(len(self.sums))
            with serial(prod(middle, start=int64(1))) as task:
                row = [head, *_unravel(task, middle)]
                self.run(totals, row, index, int64(0), columns)
            if partial is None:
                self.finish(totals.folded(), index)
            else:
                for buffer, total in zip(partial, totals.folded(), strict=True):
                    T.buffer_store(buffer, total, [head])
        if partial is not None:
            self.finish([_sum_of(buffer, heads) for buffer in partial], [])

    def run(self, totals: _Totals, row: Index, index: Index, first: Expr, count: Expr) -> None:
        """`count` elements of a row, from column `first` on, which share the scale at `index`."""
        shared = Element.of(self.form, int64(0), self.scale, self.zero_point, index)
        scale, zero_point = T.bind(shared.scale), T.bind(shared.zero_point)

        def step(sums: list[tirx.Buffer], lane: Expr, at: tuple[Expr, ...]) -> None:
            def store(buffer: tirx.Buffer, index: Index, value: Callable[..., Expr]) -> None:
                x, gy = self.x[at].astype("float32"), self.gy[at]
                # Named, since TVM makes a branch of a select that loads.
                names = tirx.Var("gy", gy.ty.dtype), tirx.Var("x", "float32")
                result = value(names[0], Element(self.form, names[1], scale, zero_point))
                result = tirx.Let(names[0], gy, tirx.Let(names[1], x, result))
                T.buffer_store(buffer, result.astype(buffer.dtype), index)

            store(self.dx, at, x_partial)
            for total, term in zip(sums, self.terms, strict=True):
                store(total, [lane], lambda *e, total=total, term=term: total[lane] + term(*e))

        with serial(count // _LANES) as vector, vectorized(_LANES) as lane:
            step(totals.lanes, lane, (*row, first + vector * _LANES + lane))
        with serial(count % _LANES) as rest:
            step(totals.rest, int64(0), (*row, first + count // _LANES * _LANES + rest))

    def finish(self, totals: list[Expr], index: Index) -> None:
        step = stored_scale(self.form, self.scale[tuple(index)]).astype("float64")
        ds, *dz = totals
        for buffer, value in zip(
            self.sums, [ds / step, *(total * step for total in dz)], strict=True
        ):
            T.buffer_store(buffer, value.astype(buffer.dtype), index)


class _Totals:
    """Zeroed float64 sums: 16 lanes each, and one for what fills no vector."""

    def __init__(self, count: int) -> None:
        self.lanes = [T.alloc_buffer((_LANES,), "float64", scope="local") for _ in range(count)]
        self.rest = [T.alloc_buffer((1,), "float64", scope="local") for _ in range(count)]
        for lanes, rest in zip(self.lanes, self.rest, strict=True):
            with vectorized(_LANES) as lane:
                T.buffer_store(lanes, tirx.const(0, "float64"), [lane])
            T.buffer_store(rest, tirx.const(0, "float64"), [0])

    def folded(self) -> list[Expr]:
        return [
            sum((lanes[i] for i in range(_LANES)), start=rest[0])
            for lanes, rest in zip(self.lanes, self.rest, strict=True)
        ]


def _sum_of(buffer: tirx.Buffer, extent: Expr) -> Expr:
    total = T.alloc_buffer((1,), "float64", scope="local")
    T.buffer_store(total, tirx.const(0, "float64"), [0])
    with serial(extent) as i:
        T.buffer_store(total, total[0] + buffer[i], [0])
    return total[0]


def _unravel(position: Expr, shape: Sequence[Expr]) -> list[Expr]:
    """The indices of the element at a row-major position."""
    index = []
    for extent in reversed(shape[1:]):
        index.append(position % extent)
        position = position // extent
    return [position, *reversed(index)] if shape else []
