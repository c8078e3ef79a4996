"""INT4 matmul and take: what is computed, without any tiling.

Plain PrimFuncs in the packed format of `packing`. On llvm, `Matmul` schedules them; on CUDA the
rules of dlight inline the block "dequantize" into their shared-memory or register tiles. In neither
case does the dequantized weight exist as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tvm import te, tirx

from sits_tvm.config import QuantSpec

from ..int4_format.packed_layout import SYMMETRIC_ZERO, PackedLayout

DEQUANTIZE = "dequantize"
"""Name of the block, and key of its annotation, whose value is the group size."""


Rows: TypeAlias = int | tuple[int | None, ...] | None
"""Extent of the axis of rows, or of several; None is symbolic."""


def int4_matmul(m: Rows, n: int, k: int, spec: QuantSpec, dtype: str, order: str) -> tirx.PrimFunc:
    """``Y = X @ W.T`` with a packed weight W (n, k).

    Parameters
    ----------
    m : int, None or a tuple of these
        Rows of X, or its axes of rows; None makes one symbolic.
    n, k : int
        Output and input channels.
    spec : QuantSpec
        Format of the weight.
    dtype : str
        Of X and Y: "float32", "float16" or "bfloat16".
    order : str
        Of the packed weight, see `packing`.

    Returns
    -------
    PrimFunc
        Of X (m…, k), codes, scale, zero_point if asymmetric, and the output Y (m…, n), with int64
        extents. Products and sums are float32; Y is rounded to `dtype` once. With
        `spec.activation` "bfloat16", X is rounded to that first.
    """
    rows = row_axes(m)
    x = te.placeholder((*rows, int64(k)), dtype, name="X")
    layout = PackedLayout(n, k, spec, order)
    packed = weight_placeholders(layout)
    weight = _dequantize(packed, layout)
    r = te.reduce_axis((0, int64(k)), name="k")

    def operand(*at: tirx.Expr) -> tirx.Expr:
        return x[at].astype(spec.activation or dtype).astype("float32")

    y = te.compute(
        (*rows, int64(n)),
        lambda *at: te.sum(operand(*at[:-1], r) * weight[at[-1], r], axis=r),
        name="matmul",
    )
    return prim_func([x, *packed], cast(y, dtype))


def int4_take(
    num_indices: Rows,
    n: int,
    k: int,
    spec: QuantSpec,
    dtype: str,
    order: str,
    index_dtype: str = "int64",
) -> tirx.PrimFunc:
    """Rows of a packed table W (n, k).

    Parameters
    ----------
    num_indices : int, None or a tuple of these
        Number of rows taken, or the axes of indices; None makes one symbolic.
    n, k, spec, dtype, order
        As for `int4_matmul`.
    index_dtype : str
        "int32" or "int64"; an index outside 0…n-1 gives a row of NaN.

    Returns
    -------
    PrimFunc
        Of indices (t…), codes, scale, zero_point if asymmetric, and the output (t…, k) in `dtype`.
    """
    axes = row_axes(num_indices)
    layout = PackedLayout(n, k, spec, order)
    indices = te.placeholder(axes, index_dtype, name="indices")
    packed = weight_placeholders(layout)

    def element(*at: tirx.Expr) -> tirx.Expr:
        row = indices[at[:-1]].astype("int64")
        return _row_or_nan(packed, layout, row, at[-1]).astype(dtype)

    taken = te.compute((*axes, int64(k)), element, name="take")
    return prim_func([indices, *packed], taken)


def row_axes(m: Rows) -> tuple[tirx.Expr, ...]:
    """The extents of the axes of rows."""
    extents = m if isinstance(m, tuple) else (m,)
    return tuple(
        te.var(f"m{i}" if i else "m", dtype="int64") if extent is None else int64(extent)
        for i, extent in enumerate(extents)
    )


def _row_or_nan(
    packed: Sequence[te.Tensor], layout: PackedLayout, row: tirx.Expr, column: tirx.Expr
) -> tirx.Expr:
    inside = tirx.all(row >= 0, row < int64(layout.n))
    nan = tirx.const(float("nan"), "float32")
    return tirx.if_then_else(inside, _element(packed, layout, row, column), nan)


def weight_placeholders(layout: PackedLayout) -> list[te.Tensor]:
    return [
        te.placeholder([int64(extent) for extent in shape], dtype, name=name)
        for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True)
    ]


def _dequantize(packed: Sequence[te.Tensor], layout: PackedLayout) -> te.Tensor:
    return te.compute(
        (int64(layout.n), int64(layout.k)),
        lambda j, r: _element(packed, layout, j, r),
        name=DEQUANTIZE,
        attrs={DEQUANTIZE: layout.group_size},
    )


def _element(
    packed: Sequence[te.Tensor], layout: PackedLayout, row: tirx.Expr, column: tirx.Expr
) -> tirx.Expr:
    """W[row, column] in float32: (code - zero) * scale, the subtraction in integers."""
    tile, lane = layout.lane_at(row)
    group = column // layout.group_size
    level = weight_code(packed, layout, row, column) - zero_point(packed, layout, row, group)
    return level.astype("float32") * packed[1][tile, group, lane].astype("float32")


def weight_code(
    packed: Sequence[te.Tensor], layout: PackedLayout, row: tirx.Expr, column: tirx.Expr
) -> tirx.Expr:
    """The code of W[row, column], int32."""
    indices, index = layout.code_at(row, column)
    return nibble(packed[0][indices], index)


def zero_point(
    packed: Sequence[te.Tensor], layout: PackedLayout, row: tirx.Expr, group: tirx.Expr
) -> tirx.Expr:
    """The zero point of a group, int32."""
    if layout.spec.symmetric:
        return tirx.const(SYMMETRIC_ZERO, "int32")
    indices, index = layout.zero_at(row, group)
    return nibble(packed[2][indices], index)


def nibble(word: tirx.Expr, index: tirx.Expr) -> tirx.Expr:
    """Nibble 0…7 of a word, the lowest first, int32."""
    shift = (index * 4).astype("uint32")
    return ((word >> shift) & tirx.const(15, "uint32")).astype("int32")


def cast(y: te.Tensor, dtype: str) -> te.Tensor:
    if dtype == "float32":
        return y
    return te.compute(y.shape, lambda *i: y[i].astype(dtype), name="cast")


def prim_func(inputs: Sequence[te.Tensor], *outputs: te.Tensor) -> tirx.PrimFunc:
    func = te.create_prim_func([*inputs, *outputs])
    return func.with_attr("tirx.noalias", True)


def int64(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)
