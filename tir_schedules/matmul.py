"""The llvm schedule of every matrix product: GEMV for one row, register-tiled GEMM for more."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.target import Target

from .contraction import Contraction, Int8Rows
from .cpu_target import cores
from .emit import first_that_holds, with_emitted_body
from .gemm import gemm
from .gemv import gemv
from .int8_dot import int8_dot
from .matmul_spaces import balanced, float_spaces, int8_spaces
from .matmul_workload import FAMILIES, inputs, prim_func, workload_of
from .recognise import recognise
from .tuning_space import (
    Inputs,
    Spaces,
    TunableRule,
    Workload,
    chosen,
    reachable,
    search_space,
)
from .vector_math import vectorizable_math
from .w4a8 import w4a8


class Matmul(TunableRule):
    """Schedule matmul, its transposed and batched forms, and INT4 matmul, with fused epilogues.

    One function serves every number of rows: if the number is symbolic, it is looked at when the
    function runs. Products are float32 sums whatever the operands are, but for INT8 activations.
    Functions that are no matrix product of such operands are left to other rules.
    """

    families = FAMILIES

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

    def workload(self, func: tirx.PrimFunc, target: Target) -> Workload | None:
        product = recognise(func) if target.kind.name == "llvm" else None
        return None if product is None else workload_of(product)

    def spaces(self, func: tirx.PrimFunc, target: Target) -> Spaces:
        product = recognise(func)
        return {} if product is None else _spaces(product, target)

    def prim_func(self, workload: Workload, rows: int | None) -> tirx.PrimFunc:
        return prim_func(workload, rows)

    def inputs(self, workload: Workload, rows: int, rng: np.random.Generator) -> Inputs:
        return inputs(workload, rows, rng)


def _spaces(product: Contraction, target: Target) -> Spaces:
    int8 = isinstance(product.lhs, Int8Rows)
    spaces = int8_spaces(target) if int8 else float_spaces(product, target)
    return reachable(product.rows.extent, spaces)


def _emit(product: Contraction, spaces: Spaces, parameters: dict[str, Any], target: Target) -> None:
    """Code for each bucket; where the rows are symbolic, the number decides when it runs."""
    *few, (_, last) = [
        (space, partial(_emit_bucket, product, bucket, parameters[bucket], target))
        for bucket, space in spaces.items()
    ]
    rows = product.rows.extent
    first_that_holds([(space.holds(rows), emit) for space, emit in few], last)


def _emit_bucket(product: Contraction, bucket: str, parameters: Any, target: Target) -> None:
    if isinstance(product.lhs, Int8Rows):
        w4a8(product, int8_dot(target), parameters, bucket == "1", cores(target))
    elif bucket == "1":
        gemv(product, parameters)
    else:
        gemm(product, balanced(product, parameters, cores(target)))
