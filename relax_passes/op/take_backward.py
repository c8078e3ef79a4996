"""`relax.sits.take_backward`: the gradient of `R.take`, for indices of any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Op
from tvm.relax import op as R

from tir_schedules.scatter_rows import scatter_rows

from ._register import register_op

NAME = "relax.sits.take_backward"


def take_backward(
    gy: relax.Expr,
    indices: relax.Expr,
    shape: relax.ShapeExpr | Sequence[Any],
    *,
    axis: int | None = None,
    mode: str = "fast",
) -> relax.Call:
    """Zeros of `shape`, with the slices of `gy` added where ``R.take(x, indices, axis)`` read x.

    Parameters
    ----------
    gy : Tensor (*shape[:axis], *indices.shape, *shape[axis + 1:])
        float16, bfloat16, float32 or float64. Half precision is summed in float32.
    indices : Tensor of int32 or int64, of any rank
        What lies outside the axis adds nothing, unless `mode` is "clip" or "wrap".
    shape : ShapeExpr
        Of x and of the result.
    axis : int, optional
        None: the indices count through x as a vector.

    Returns
    -------
    Call
        Tensor of `shape` and the dtype of gy.
    """
    shape = shape if isinstance(shape, relax.ShapeExpr) else relax.ShapeExpr(list(shape))
    return relax.Call(Op.get(NAME), [gy, indices, shape], {"axis": axis, "mode": mode})


def _infer(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    gy, indices, shape = call.args
    for name, arg in (("gy", gy), ("indices", indices)):
        if not isinstance(arg.ty, relax.TensorType):
            raise TypeError(f"{NAME}: {name} must be a tensor, found {arg.ty}")
    if not str(indices.ty.dtype).startswith("int"):
        raise TypeError(f"{NAME}: indices must be int32 or int64, found {indices.ty}")
    axis = call.attrs["axis"]
    if axis is not None and not -len(shape) <= int(axis) < len(shape):
        raise ValueError(f"{NAME}: axis={axis} is outside {shape}")
    return relax.TensorType(shape, str(gy.ty.dtype))


def _legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """As a matrix per index before the axis: rows (p, m, d) into a table (p, n, d)."""
    gy, indices, shape = call.args
    lengths, axis = list(shape), call.attrs["axis"]
    axis = 0 if axis is None else int(axis) % len(lengths)
    if call.attrs["axis"] is None:
        lengths = [_product(lengths)]
    p, d = _product(lengths[:axis]), _product(lengths[axis + 1 :])
    m, dtype = _product(list(indices.ty.shape)), str(gy.ty.dtype)

    wide = dtype if dtype in ("float32", "float64") else "float32"
    rows = bb.emit(R.reshape(_cast(bb, gy, wide), [p, m, d]))
    flat = bb.emit(R.reshape(indices, [m]))
    kernel = scatter_rows(wide, str(indices.ty.dtype), str(call.attrs["mode"]))
    table = relax.TensorType([p, lengths[axis], d], wide)
    gvar = bb.add_func(kernel.without_attr("global_symbol"), "scatter_rows")
    out = bb.emit(relax.call_tir(gvar, [rows, flat], table))
    return _cast(bb, bb.emit(R.reshape(out, shape)), dtype)


def _product(lengths: list[Any]) -> Any:
    total = tvm.tirx.IntImm("int64", 1)
    for length in lengths:
        total = total * length
    return tvm.sym.Analyzer().simplify(total)


def _cast(bb: relax.BlockBuilder, x: relax.Expr, dtype: str) -> relax.Expr:
    return x if x.ty.dtype == dtype else bb.emit(R.astype(x, dtype))


register_op(NAME, _infer, take_backward, legalize=_legalize)
