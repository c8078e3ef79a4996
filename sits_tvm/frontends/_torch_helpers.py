"""What the converters share. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from tvm import relax
from tvm.relax import op as R


def emit(imp: Any, expr: relax.Expr) -> relax.Expr:
    return imp.block_builder.emit(expr)


def arg(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def cast(imp: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    return x if x.ty.dtype == dtype else emit(imp, R.astype(x, dtype))


def scaled(imp: Any, x: relax.Expr, factor: float) -> relax.Expr:
    if factor == 1:
        return x
    return emit(imp, R.multiply(x, relax.const(factor, str(x.ty.dtype))))


def leading_ones(imp: Any, x: relax.Expr, count: int) -> relax.Expr:
    return emit(imp, R.expand_dims(x, list(range(count)))) if count else x


def result_dtype(node: Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def common_dtype(node: Node) -> str:
    """Of the two operands, by torch's promotion."""
    values = [a.meta["val"] if isinstance(a, Node) else a for a in node.args[:2]]
    stand_ins = [_NUMBER.get(type(v), v) for v in values]
    return str(torch.result_type(*stand_ins)).removeprefix("torch.")


_NUMBER: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}


def operand(imp: Any, arg: Any, dtype: str) -> relax.Expr:
    value = imp.env[arg] if isinstance(arg, Node) else arg
    if isinstance(value, bool | int | float):
        return relax.const(value, dtype)
    if isinstance(value.ty, relax.TensorType):
        return cast(imp, value, dtype)
    shape = emit(imp, relax.ShapeExpr([value]))
    tensor = emit(imp, R.reshape(emit(imp, R.shape_to_tensor(shape)), []))
    return cast(imp, tensor, dtype)
