"""Gradients of lookups: rows and elements are added where they were read."""

from __future__ import annotations

from tvm import relax
from tvm.relax import BlockBuilder as Builder
from tvm.relax import Expr
from tvm.relax import op as R

from ..op.take_backward import take_backward
from ._rules import gradient, none


@gradient("take")
def _take(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    x, indices = call.args
    axis = None if call.attrs["axis"] is None else int(call.attrs["axis"])
    grad = take_backward(g, indices, x.ty.shape, axis=axis, mode=str(call.attrs["mode"]))
    return [grad, *none(indices)]


@gradient("sits.take_backward")
def _take_backward(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    _, indices, shape = call.args
    axis = None if call.attrs["axis"] is None else int(call.attrs["axis"])
    return [R.take(g, indices, axis, str(call.attrs["mode"])), *none(indices, shape)]


@gradient("gather_elements")
def _gather_elements(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    x, indices = call.args
    zeros = bb.emit(R.zeros(x.ty.shape, str(x.ty.dtype)))
    axis = int(call.attrs.axis)
    return [R.scatter_elements(zeros, indices, g, axis, "add"), *none(indices)]


@gradient("scatter_elements")
def _scatter_elements(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """For reduction="add": every update, and the data, go to the result unchanged."""
    indices = call.args[1]
    if str(call.attrs.reduction) != "add":
        raise ValueError(f'reduction={call.attrs.reduction!r}: only "add" has a gradient')
    return [g, *none(indices), R.gather_elements(g, indices, int(call.attrs.axis))]
