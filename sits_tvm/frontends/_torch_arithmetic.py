"""Converters of elementwise ops and reductions. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.relax import op as R

from ._torch_helpers import (
    Node,
    arg,
    cast,
    common_dtype,
    emit,
    operand,
    result_dtype,
    scaled,
)

# Arithmetic: operands get torch's common dtype first; an integer divides to a float.


def _arithmetic(op: Callable, on_bool: Callable | None = None) -> Callable:
    def convert(node: Node, imp: Any) -> relax.Expr:
        dtype = common_dtype(node)
        lhs, rhs = (operand(imp, arg, dtype) for arg in node.args[:2])
        rhs = scaled(imp, rhs, node.kwargs.get("alpha", 1))
        return emit(imp, (on_bool if dtype == "bool" and on_bool else op)(lhs, rhs))

    return convert


def _rsub(node: Node, imp: Any) -> relax.Expr:
    alpha = arg(node, 2, "alpha", 1)
    lhs, rhs = (operand(imp, arg, common_dtype(node)) for arg in node.args[:2])
    return emit(imp, R.subtract(rhs, scaled(imp, lhs, alpha)))


def _divide(node: Node, imp: Any) -> relax.Expr:
    mode = node.kwargs.get("rounding_mode")
    dtype = common_dtype(node) if mode else result_dtype(node)
    lhs, rhs = (operand(imp, arg, dtype) for arg in node.args[:2])
    if mode == "floor":
        return emit(imp, R.floor_divide(lhs, rhs))
    quotient = emit(imp, R.divide(lhs, rhs))
    is_float = "float" in dtype
    return emit(imp, R.trunc(quotient)) if mode == "trunc" and is_float else quotient


def _power(node: Node, imp: Any) -> relax.Expr:
    """Small and integer powers by products: TVM's power takes no bfloat16 and no integers."""
    exponent, dtype = node.args[1], result_dtype(node)
    x = operand(imp, node.args[0], dtype)
    is_count = isinstance(exponent, int | float) and exponent in range(65)
    if not is_count or ("float" in dtype and not 1 <= exponent <= 3):
        return emit(imp, R.power(x, operand(imp, exponent, dtype)))
    product = x if exponent else emit(imp, R.ones_like(x))
    for _ in range(int(exponent) - 1):
        product = emit(imp, R.multiply(product, x))
    return product


def _clamp(node: Node, imp: Any) -> relax.Expr:
    dtype = result_dtype(node)
    x = cast(imp, imp.env[node.args[0]], dtype)
    for position, (name, bound) in enumerate((("min", R.maximum), ("max", R.minimum)), 1):
        limit = arg(node, position, name, None)
        if limit is not None:
            x = emit(imp, bound(x, operand(imp, limit, dtype)))
    return x


def _where(node: Node, imp: Any) -> relax.Expr:
    dtype = result_dtype(node)
    x, y = (operand(imp, arg, dtype) for arg in node.args[1:3])
    return emit(imp, R.where(imp.env[node.args[0]], x, y))


# Reductions: torch adds up bool and narrow integers in int64.


def _cumulative(op: Callable) -> Callable:
    def convert(node: Node, imp: Any) -> relax.Expr:
        node.kwargs.get("dtype")  # torch already applied it to the type of the result
        x = cast(imp, imp.env[node.args[0]], result_dtype(node))
        if x.ty.ndim == 0:
            return x
        return emit(imp, op(x, arg(node, 1, "dim", 0)))

    return convert


def _reduction(op: Callable) -> Callable:
    """(x, dim=None, keepdim=False, dtype=None), computed in the dtype of the result."""

    def convert(node: Node, imp: Any) -> relax.Expr:
        node.kwargs.get("dtype")
        x = cast(imp, imp.env[node.args[0]], result_dtype(node))
        dim = arg(node, 1, "dim", None)
        axis = None if dim is None or dim == [] else dim
        return emit(imp, op(x, axis, keepdims=arg(node, 2, "keepdim", False)))

    return convert


def _extreme(op: Callable) -> Callable:
    """amax, amin; a bool goes through int8, which has a smallest value."""

    def convert(node: Node, imp: Any) -> relax.Expr:
        x, dtype = imp.env[node.args[0]], result_dtype(node)
        x = cast(imp, x, "int8") if dtype == "bool" else x
        axis = arg(node, 1, "dim", None) or None
        return cast(imp, emit(imp, op(x, axis, arg(node, 2, "keepdim", False))), dtype)

    return convert


def _smallest(node: Node, imp: Any) -> relax.Expr:
    """min along one axis: values and positions."""
    x, axis = imp.env[node.args[0]], node.args[1]
    keep = arg(node, 2, "keepdim", False)
    return relax.Tuple([emit(imp, R.min(x, axis, keep)), emit(imp, R.argmin(x, axis, keep))])


def _any(node: Node, imp: Any) -> relax.Expr:
    x = cast(imp, cast(imp, imp.env[node.args[0]], "bool"), "int8")
    dim = arg(node, 1, "dim", None)
    axis = None if dim is None or dim == [] else dim
    return cast(imp, emit(imp, R.max(x, axis, arg(node, 2, "keepdim", False))), "bool")


_COMPARISONS = {
    "eq": R.equal,
    "ne": R.not_equal,
    "lt": R.less,
    "le": R.less_equal,
    "gt": R.greater,
    "ge": R.greater_equal,
}
_ARITHMETIC = {
    "add": _arithmetic(R.add, R.logical_or),
    "sub": _arithmetic(R.subtract),
    "mul": _arithmetic(R.multiply, R.logical_and),
    "rsub": _rsub,
    "div": _divide,
    "remainder": _arithmetic(R.floor_mod),
    "fmod": _arithmetic(R.mod),
    **{name: _arithmetic(op) for name, op in _COMPARISONS.items()},
}
_SHIFTS = {"left": _arithmetic(R.left_shift), "right": _arithmetic(R.right_shift)}
_KINDS = ("Tensor", "Scalar")

ARITHMETIC: dict[str, Callable[[Node, Any], Any]] = {
    **{f"{name}.{kind}": f for name, f in _ARITHMETIC.items() for kind in _KINDS},
    "div.Tensor_mode": _divide,
    "div.Scalar_mode": _divide,
    "floor_divide.default": _arithmetic(R.floor_divide),
    "maximum.default": _arithmetic(R.maximum, R.logical_or),
    "minimum.default": _arithmetic(R.minimum, R.logical_and),
    **{f"__{side[0]}shift__.{kind}": f for side, f in _SHIFTS.items() for kind in _KINDS},
    **{f"bitwise_{side}_shift.Tensor": f for side, f in _SHIFTS.items()},
    **{f"bitwise_{side}_shift.Tensor_Scalar": f for side, f in _SHIFTS.items()},
    "pow.Tensor_Scalar": _power,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "where.self": _where,
    "where.ScalarOther": _where,
    "where.ScalarSelf": _where,
    "cumsum.default": _cumulative(R.cumsum),
    "cumprod.default": _cumulative(R.cumprod),
    "sum.default": _reduction(R.sum),
    "sum.dim_IntList": _reduction(R.sum),
    "prod.default": _reduction(R.prod),
    "prod.dim_int": _reduction(R.prod),
    "amax.default": _extreme(R.max),
    "amin.default": _extreme(R.min),
    "max.default": _extreme(R.max),
    "min.default": _extreme(R.min),
    "min.dim": _smallest,
    "any.default": _any,
    "any.dim": _any,
    "any.dims": _any,
}
