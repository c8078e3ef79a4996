"""The CUDA schedule of `int8_matmul.quantize_activation`: one pass over the activations.

The threads of a part, the columns that share a scale, keep it in registers, eight columns each, and
find its largest magnitude by shuffles, in parts of more than a warp by shared memory, too.
"""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target
from tvm.tirx.script import builder as T

from ..cuda_target import architecture
from ..emit import ceildiv, when, with_emitted_body
from ..int4_format.activation_format import ActivationFormat
from ..matmul.int8_matmul import QUANTIZE_ACTIVATION
from ..tir_nodes import collect, is_const
from .part import Part
from .shape import MOST_VECTORS, Shape

_SMALLEST_ARCH = 80


class QuantizeActivationCuda(ScheduleRule):
    """Threads side by side for each part; left to other rules: one of more than 65536 columns.

    A part of float32 of more than 32768 columns has no room in registers, and spills.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None if it is not for this rule (or `tunable`)."""
        if target.kind.name != "cuda" or architecture(target) < _SMALLEST_ARCH or tunable:
            return None
        annotations = [block.annotations for block in collect(func.body, s_tir.SBlock)]
        found = [a for a in annotations if QUANTIZE_ACTIVATION in a]
        if not found:
            return None
        form = ActivationFormat.from_annotations(found[0])
        shape = Shape.of(func.params, int(found[0][QUANTIZE_ACTIVATION]), form)
        if shape.vectors > MOST_VECTORS:
            return None
        emitted = with_emitted_body(func, lambda: _emit(shape, func.params))
        return s_tir.Schedule(emitted)


def _emit(shape: Shape, params: list[tirx.Buffer]) -> None:
    if is_const(shape.rows, 0):
        T.evaluate(0)
        return
    with when(isinstance(shape.rows, tirx.IntImm) or shape.rows > 0):
        x, codes, scale, sums = (_flat(buffer, shape.rows) for buffer in params)
        count = shape.rows * shape.parts_in_pairs
        with (
            T.launch_thread("blockIdx.x", ceildiv(count, shape.parts_per_block)) as block,
            T.launch_thread("threadIdx.x", shape.threads) as thread,
        ):
            first = T.Cast("uint32", block) * shape.parts_per_block
            number = T.Bind(first + T.Cast("uint32", thread // shape.lanes))
            Part(shape, number, thread % shape.lanes).emit(x, codes, scale, sums)


def _flat(buffer: tirx.Buffer, rows: tirx.Expr) -> tirx.Buffer:
    """As one axis: axes of rows would cost divisions."""
    size = rows * buffer.shape[-1]
    return T.decl_buffer((size,), str(buffer.dtype), data=buffer.data)
