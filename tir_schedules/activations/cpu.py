"""The llvm schedule of `int8_matmul.quantize_activation`: two passes over each row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target
from tvm.tirx.script import builder as T

from ..contraction import unflatten
from ..emit import first_that_holds, int64, parallel, scratch, serial, vectorized, with_emitted_body
from ..int4_format.activation_format import ActivationFormat, magnitude
from ..matmul.int8_matmul import QUANTIZE_ACTIVATION
from ..tir_nodes import collect, is_const

_LANES = 16
_WORD_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbours in k is at each byte of two words."""


class QuantizeActivation(ScheduleRule):
    """One task per row; a single row stays on the calling thread. Packed codes are for others."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None if it is not for this rule (or `tunable`)."""
        if target.kind.name != "llvm" or tunable:
            return None
        annotations = [block.annotations for block in collect(func.body, s_tir.SBlock)]
        found = [a for a in annotations if QUANTIZE_ACTIVATION in a]
        form = ActivationFormat.from_annotations(found[0]) if found else None
        if form is None or form.packed:
            return None
        x, codes, scale, sums = func.params
        row = _Row(x, codes, scale, sums, int(found[0][QUANTIZE_ACTIVATION]), form)
        return s_tir.Schedule(with_emitted_body(func, row.emit_all))


Row: TypeAlias = Sequence[tirx.Expr]


class _Row:
    """The kernel for a row of X, by vectors that do not cross the end of a group of the weight."""

    def __init__(
        self,
        x: tirx.Buffer,
        codes: tirx.Buffer,
        scale: tirx.Buffer,
        sums: tirx.Buffer,
        group_size: int,
        form: ActivationFormat,
    ) -> None:
        self.x, self.codes, self.scale, self.sums, self.form = x, codes, scale, sums, form
        self.lanes = _LANES if group_size % _LANES == 0 else _LANES // 2
        self.per_group = group_size // self.lanes

    def emit_all(self) -> None:
        *rows, _ = self.x.shape
        count = prod(rows, start=int64(1))
        if is_const(count, 0):
            T.evaluate(0)
            return

        def all_rows() -> None:
            with parallel(count) as row:
                self._emit([T.Bind(at) for at in unflatten(row, rows)])

        first_that_holds([(count == 1, lambda: self._emit([int64(0)] * len(rows)))], all_rows)

    def _emit(self, row: Row) -> None:
        *_, groups = self.sums.shape
        *_, scales = self.scale.shape
        together = int(groups) // int(scales)
        values = scratch(groups * self.per_group * self.lanes)
        self._copy(row, values)
        with serial(scales) as index:
            first = T.Bind(index * together)
            scale = T.Bind(self._scale(first * self.per_group, together * self.per_group, values))
            T.buffer_store(self.scale, scale, [*row, index])
            with serial(together) as inner:
                group = T.Bind(first + inner)
                total = _zeros(self.lanes)
                with serial(self.per_group) as v:
                    self._quantize(row, group * self.per_group + v, values, scale, total)
                T.buffer_store(self.sums, _reduce("add", total, self.lanes), [*row, group])

    def _copy(self, row: Row, values: tirx.Buffer) -> None:
        """Copy the row to `values` in float32, zeros behind it."""
        *_, depth = self.x.shape

        def copy(column: tirx.Expr) -> None:
            T.buffer_store(values, self.x[(*row, column)].astype("float32"), [column])

        whole = depth // _LANES
        with serial(whole) as v, vectorized() as lane:
            copy(v * _LANES + lane)
        with serial(depth - whole * _LANES) as rest:
            copy(whole * _LANES + rest)
        with serial(values.shape[0] - depth) as rest:
            T.buffer_store(values, tirx.const(0, "float32"), [depth + rest])

    def _scale(self, first: tirx.Expr, count: int, values: tirx.Buffer) -> tirx.Expr:
        """That of `count` vectors from `first` on."""
        largest = _zeros(self.lanes)
        with serial(count) as v, vectorized(self.lanes) as lane:
            value = magnitude(values[(first + v) * self.lanes + lane])
            T.buffer_store(largest, tirx.max(largest[lane], value), [lane])
        return self.form.scale(_reduce("smax", largest, self.lanes))

    def _quantize(
        self,
        row: Row,
        vector: tirx.Expr,
        values: tirx.Buffer,
        scale: tirx.Expr,
        total: tirx.Buffer,
    ) -> None:
        code = T.alloc_buffer((int64(self.lanes),), "int32", scope="local")
        with vectorized(self.lanes) as lane:
            value = self.form.code(values[vector * self.lanes + lane], scale)
            T.buffer_store(code, value, [lane])
            T.buffer_store(total, total[lane] + code[lane], [lane])
        order = [start + at for start in range(0, self.lanes, 8) for at in _WORD_ORDER]
        all_lanes = tirx.Ramp(int64(0), int64(1), self.lanes)
        byte = tirx.Cast(f"int8x{self.lanes}", code[all_lanes])
        count = self.lanes // 4
        words = tirx.reinterpret(
            f"int32x{count}", tirx.Shuffle([byte], [int64(at) for at in order])
        )
        T.buffer_store(self.codes, words, [*row, tirx.Ramp(vector * count, int64(1), count)])


def _zeros(lanes: int) -> tirx.Buffer:
    buffer = T.alloc_buffer((int64(lanes),), "int32", scope="local")
    with vectorized(lanes) as lane:
        T.buffer_store(buffer, tirx.const(0, "int32"), [lane])
    return buffer


def _reduce(kind: str, vector: tirx.Buffer, lanes: int) -> tirx.Expr:
    """LLVM's reduction of the lanes of a vector of int32."""
    name = f"llvm.vector.reduce.{kind}.v{lanes}i32"
    all_lanes = tirx.Ramp(int64(0), int64(1), lanes)
    return tirx.call_llvm_pure_intrin("int32", name, vector[all_lanes])
