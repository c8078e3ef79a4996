"""What a tuning record of a matrix product with an INT4 weight is of, and back to a PrimFunc."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from sits_tvm.config import QuantSpec

from ..contraction import Contraction, Int4Weight, Int8Rows
from ..int4_format.activation_format import UNIT, ActivationFormat, scale_columns
from ..int4_format.packed_layout import PackedLayout
from ..records.space import Excerpt
from ..records.workloads import MATMULS, MatmulWorkload
from .int4_matmul import int4_matmul
from .int8_matmul import int8_matmul

_FLOAT, _INT8 = MATMULS


def workload_of(product: Contraction) -> MatmulWorkload | None:
    """None if the weight is not INT4. For INT8 activations, k is padded to whole groups.

    Packed activations are "int4"; those of 4 bits that are not are "int8", as their kernels are.
    """
    weight = product.rhs
    if not isinstance(weight, Int4Weight):
        return None
    if isinstance(product.lhs, Int8Rows):
        family, k = _INT8, product.padded_k.value
        dtype = "int4" if product.lhs.is_packed else "int8"
    else:
        family, k = _FLOAT, product.reduction.dom.extent.value
        dtype = product.left_dtype
    return MatmulWorkload(
        family=family,
        n=product.column.dom.extent.value,
        k=k,
        group_size=weight.group_size if weight.group_size < k else -1,
        symmetric=weight.zero_point is None,
        scale_dtype=str(weight.scale.dtype),
        dtype=dtype,
    )


def prim_func(workload: MatmulWorkload, rows: int | None, order: str = "vectors") -> tirx.PrimFunc:
    layout = _layout(workload, order)
    if workload.family == _INT8:
        return int8_matmul(rows, layout, "float32")
    dtype = "float32" if _is_rounded(workload, order) else workload.dtype
    return int4_matmul(rows, layout.n, layout.k, layout.spec, dtype, order)


def inputs(
    workload: MatmulWorkload, rows: int, rng: np.random.Generator, order: str = "vectors"
) -> list[np.ndarray]:
    """Arguments of `prim_func`, from a normal distribution; codes are uniform."""
    layout = _layout(workload, order)
    weight = [
        rng.integers(0, 1 << 32, shape, dtype="uint32")
        if dtype == "uint32"
        else rng.standard_normal(shape).astype(dtype)
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    ]
    if workload.family == _FLOAT:
        x = rng.standard_normal((rows, layout.k), "float32")
        return [x if _is_rounded(workload, order) else x.astype(workload.dtype), *weight]
    form = ActivationFormat.of(layout)
    codes = rng.integers(-form.largest, form.largest + 1, (rows, layout.padded_k), dtype="int8")
    sums = codes.reshape(rows, layout.groups, layout.group_size).sum(-1, dtype="int32")
    scales = layout.padded_k // scale_columns(layout.k, layout.group_size)
    scale = rng.random((rows, scales), "float32")
    return [_packed(codes) if form.packed else codes.view("int32"), scale, sums, *weight]


def _packed(codes: np.ndarray) -> np.ndarray:
    """Codes (m, k) as words of whole units, in some order of the columns of a half."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % UNIT)))
    halves = padded.reshape(len(codes), -1, 2, UNIT // 2)
    return (halves[:, :, 0] & 15 | halves[:, :, 1] << 4).reshape(len(codes), -1).view("int32")


def excerpt(
    workload: MatmulWorkload, rows: int, inputs: list[np.ndarray], order: str = "vectors"
) -> Excerpt:
    """A few rows."""
    at = sorted({0, 1 % rows, rows // 2, rows - 1})
    first = len(inputs) - len(_layout(workload, order).shapes)
    part = [*(x[at] for x in inputs[:first]), *inputs[first:]]
    return Excerpt(prim_func(workload, len(at), order), part, at, workload.k)


def _is_rounded(workload: MatmulWorkload, order: str) -> bool:
    """Whether bfloat16 is what float32 is rounded to. Tensor cores read bfloat16."""
    return workload.dtype == "bfloat16" and order != "fragments"


def _layout(workload: MatmulWorkload, order: str) -> PackedLayout:
    dtype = workload.dtype
    is_named = workload.family == _INT8 or _is_rounded(workload, order)
    spec = QuantSpec(
        group_size=workload.group_size,
        symmetric=workload.symmetric,
        scale_dtype=workload.scale_dtype,
        activation=dtype if is_named else None,
    )
    return PackedLayout(workload.n, workload.k, spec, order)
