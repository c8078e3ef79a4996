"""Look through bindings: what a variable holds, whether two are equal, what a scale is stretched
from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

_DEPTH = 16
_RESHAPES = ("reshape", "expand_dims", "squeeze")


class Values:
    """The bindings of one function."""

    def __init__(self, func: relax.Function) -> None:
        self.bound = relax.analysis.get_var2val(func)

    def of(self, expr: relax.Expr) -> relax.Expr:
        """What `expr` is bound to, through copies."""
        while isinstance(expr, relax.Var) and expr in self.bound:
            expr = self.bound[expr]
        return expr

    def call(self, expr: relax.Expr) -> tuple[str, Any]:
        """The op that makes `expr`, without "relax.", and its call; ("", None) for others."""
        value = self.of(expr)
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            return value.op.name.removeprefix("relax."), value
        return "", None

    def constant(self, expr: relax.Expr) -> np.ndarray | None:
        """The value of a constant, also one that is reshaped, broadcast or cast."""
        value = self.of(expr)
        if isinstance(value, tvm.tirx.IntImm | tvm.tirx.FloatImm):
            return np.asarray(value.value)
        if isinstance(value, tvm.ir.GenericConst):
            return value.value.numpy()
        name, call = self.call(value)
        if name not in (*_RESHAPES, "broadcast_to", "astype"):
            return self._filled(name, call)
        inner, shape = self.constant(call.args[0]), static_shape(value)
        if inner is None or shape is None:
            return None
        if name == "astype":
            return inner.astype(str(value.ty.dtype))
        is_number = inner.ndim == 0  # as `_filled` gives it
        if name == "broadcast_to" or is_number:
            return np.broadcast_to(inner, shape)
        return inner.reshape(shape)

    def _filled(self, name: str, call: Any) -> np.ndarray | None:
        """ones, zeros and full, as one number."""
        if name not in ("ones", "zeros", "full"):
            return None
        dtype = str(call.ty.dtype)
        number = self.constant(call.args[1]) if name == "full" else np.asarray(name == "ones")
        return None if number is None else number.astype(dtype)

    def number(self, expr: relax.Expr) -> float | None:
        """The value of a constant whose elements are all equal."""
        array = self.constant(expr)
        if array is None or array.size == 0 or not (array == array.flat[0]).all():
            return None
        return float(array.flat[0])

    def same(self, a: relax.Expr, b: relax.Expr, depth: int = _DEPTH) -> bool:
        """Whether two expressions are computed alike from the same variables and constants."""
        a, b = self.of(a), self.of(b)
        if a.same_as(b):
            return True
        if isinstance(a, relax.Call) and isinstance(b, relax.Call) and depth:
            return (
                tvm_ffi.structural_equal(a.op, b.op)
                and tvm_ffi.structural_equal(a.attrs, b.attrs)
                and len(a.args) == len(b.args)
                and all(self.same(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))
            )
        if isinstance(a, relax.Var) or isinstance(b, relax.Var):
            return False
        return bool(tvm_ffi.structural_equal(a, b))

    def unstretched(self, expr: relax.Expr) -> tuple[relax.Expr, list[Any]]:
        """What `expr` repeats by broadcasting, and the shape in which it broadcasts."""
        name, call = self.call(expr)
        while name == "broadcast_to":
            expr = call.args[0]
            name, call = self.call(expr)
        shape = list(expr.ty.shape)
        while name in _RESHAPES and _only_ones_change(call):
            expr = call.args[0]
            name, call = self.call(expr)
        return expr, shape


def is_tensor(expr: relax.Expr) -> bool:
    """Whether `expr` is a tensor of known shape."""
    ty = getattr(expr, "ty", None)
    return isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)


def static_shape(expr: relax.Expr) -> list[int] | None:
    """The shape, where all dimensions are numbers."""
    return static_dims(list(expr.ty.shape)) if is_tensor(expr) else None


def static_dims(dims: Sequence[Any]) -> list[int] | None:
    if not all(isinstance(dim, int | tvm.tirx.IntImm) for dim in dims):
        return None
    return [int(dim) for dim in dims]


def is_one(dim: Any) -> bool:
    return equal_dims(dim, 1)


def equal_dims(a: Any, b: Any) -> bool:
    numbers = static_dims([a, b])
    if numbers is not None:
        return numbers[0] == numbers[1]
    return bool(tvm.sym.Analyzer().can_prove_equal(a, b))


def equal_shapes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(equal_dims, a, b))


def is_power_of_two(array: np.ndarray) -> bool:
    """Whether every element is a positive power of two with a finite reciprocal."""
    with np.errstate(divide="ignore", over="ignore"):
        good = np.isfinite(array) & (array > 0) & np.isfinite(1 / array)
    return bool(good.all() and (np.frexp(np.where(good, array, 1))[0] == 0.5).all())


def _only_ones_change(call: relax.Call) -> bool:
    if not (is_tensor(call) and is_tensor(call.args[0])):
        return False
    shapes = [[d for d in e.ty.shape if not is_one(d)] for e in (call, call.args[0])]
    return equal_shapes(*shapes)
