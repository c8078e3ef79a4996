"""The llvm schedule of every matrix product: GEMV for one row, register-tiled GEMM for more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from tvm import s_tir, tirx
from tvm.target import Target
from tvm.tirx.script import builder as T

from ..contraction import Contraction, Int4Weight, Int8Rows
from ..cpu.vector_math import vectorizable_math
from ..cpu_target import cores, has_feature
from ..emit import when, with_emitted_body
from ..matmul.recognise import recognise
from ..matmul.workload import excerpt, inputs, prim_func, workload_of
from ..records.space import (
    Spaces,
    TunableRule,
    chosen,
    emit_buckets,
    reachable,
    search_space,
)
from ..records.workloads import MATMULS, MatmulWorkload
from ..tir_nodes import is_const
from .gemm import gemm
from .gemv import gemv
from .int4_arithmetic import MakeArithmetic
from .int4_tiles import RegisterTile, int4_product
from .int8_dot import int8_dot
from .spaces import balanced, bfloat16_spaces, float32_spaces, float_spaces, int8_spaces
from .w4a8 import Int8Arithmetic
from .w4a16 import Float32Arithmetic
from .w4a16_bfloat16 import LLVM, Bfloat16Arithmetic


class Matmul(TunableRule[MatmulWorkload]):
    """Schedule matmul, its transposed and batched forms, and INT4 matmul, with fused epilogues.

    One function serves every number of rows: if the number is symbolic, it is looked at when the
    function runs. Products are float32 sums whatever the operands are, but for INT8 activations.
    Functions that are no matrix product of such operands are left to other rules.
    """

    families = MATMULS

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or its search space; None if it is not for this rule."""
        product = recognise(func) if target.kind.name == "llvm" else None
        if product is None:
            return None
        spaces = _spaces(product, target)
        if tunable:
            return search_space(func, spaces)
        parameters = chosen(func, spaces)
        scheduled = with_emitted_body(func, lambda: _emit(product, spaces, parameters, target))
        return s_tir.Schedule(scheduled.with_body(vectorizable_math(scheduled.body)))

    def workload(self, func: tirx.PrimFunc, target: Target) -> MatmulWorkload | None:
        product = recognise(func) if target.kind.name == "llvm" else None
        return None if product is None else workload_of(product)

    def spaces(self, func: tirx.PrimFunc, target: Target) -> Spaces:
        product = recognise(func)
        return {} if product is None else _spaces(product, target)

    prim_func = staticmethod(prim_func)
    inputs = staticmethod(inputs)
    excerpt = staticmethod(excerpt)


def _spaces(product: Contraction, target: Target) -> Spaces:
    return reachable(product.rows.extent, _family(product, target)(product, target))


def _family(product: Contraction, target: Target) -> Callable[[Contraction, Target], Spaces]:
    if not isinstance(product.rhs, Int4Weight):
        return float_spaces
    if isinstance(product.lhs, Int8Rows):
        return int8_spaces
    return bfloat16_spaces if _multiplies_pairs(product, target) else float32_spaces


def _multiplies_pairs(product: Contraction, target: Target) -> bool:
    """Whether the activations are bfloat16, and the CPU has an instruction for them."""
    return product.left_dtype == "bfloat16" and has_feature("avx512bf16", target)


def _emit(product: Contraction, spaces: Spaces, parameters: dict[str, Any], target: Target) -> None:
    """The kernel of each bucket, for its rows.

    No row is no work: TVM lifts what buckets share out of them, even a division by zero.
    """
    rows = product.rows.extent
    if is_const(rows, 0):
        T.evaluate(0)
        return
    with when(isinstance(rows, tirx.IntImm) or rows > 0):
        emit_buckets(
            rows, spaces, lambda bucket: _emit_bucket(product, bucket, parameters[bucket], target)
        )


def _emit_bucket(product: Contraction, bucket: str, parameters: Any, target: Target) -> None:
    one, count = bucket == "1", cores(target)
    if isinstance(parameters, RegisterTile):
        arithmetic = _arithmetic(product, target)
        imports = T.attr(0, "pragma_import_llvm", LLVM)
        with imports if arithmetic is Bfloat16Arithmetic else nullcontext():
            int4_product(product, arithmetic, parameters, one, count)
    elif one:
        gemv(product, parameters)
    else:
        gemm(product, balanced(product, parameters, count))


def _arithmetic(product: Contraction, target: Target) -> MakeArithmetic:
    if isinstance(product.lhs, Int8Rows):
        return partial(Int8Arithmetic, dot=int8_dot(target))
    return Bfloat16Arithmetic if _multiplies_pairs(product, target) else Float32Arithmetic
