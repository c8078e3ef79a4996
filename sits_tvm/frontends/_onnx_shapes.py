"""Shapes that an ONNX graph computes, as expressions of the dimensions of its inputs.

Exporters write the shape of a Reshape as nodes: Shape, Gather, Concat and arithmetic. TVM's
importer loses the dimensions on most ways through them; here the elements of such values are
followed, and a node that takes a shape gets them. Imports neither onnx nor its importer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GenericConst

SHAPE_OPERANDS = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}
_MAX_ELEMENTS = 64
_ONNX_INTEGERS = (6, 7)  # TensorProto.INT32, INT64
Elements = np.ndarray  # of rank 0 or 1; int, bool, or an expression of dimensions


class ShapeValues:
    """The elements of the values that are computed of shapes and constants alone."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[relax.Expr, Elements]] = {}

    def of(self, expr: relax.Expr) -> Elements | None:
        if isinstance(expr, relax.ShapeExpr):
            return _elements(list(expr.values))
        if isinstance(expr, GenericConst):
            array = expr.value.numpy()
            small = array.ndim < 2 and array.size <= _MAX_ELEMENTS
            return _elements(array.tolist()) if small and array.dtype.kind in "ib" else None
        if tvm.ir.is_prim_expr(expr):
            return _elements(expr)
        known = self._known.get(hash(expr))
        return known[1] if known and known[0].same_as(expr) else None

    def follow(
        self, op: str, inputs: Sequence[relax.Expr | None], attrs: Mapping[str, Any]
    ) -> Elements | None:
        """The elements of what a node computes, or None."""
        values = [None if value is None else self.of(value) for value in inputs]
        lost = any(v is None and i is not None for v, i in zip(values, inputs, strict=True))
        if op not in _RULES or lost:
            return None
        try:
            made = _RULES[op](attrs, *values)
        except (IndexError, TypeError, ValueError):  # the node is wrong, or has no such rule
            return None
        return made if made is not None and made.ndim < 2 else None

    def remember(self, expr: relax.Expr, elements: Elements) -> None:
        self._known[hash(expr)] = (expr, elements)

    def put_shape(self, bb: relax.BlockBuilder, op: str, inputs: list[Any]) -> bool:
        """In the inputs of an op of `SHAPE_OPERANDS`, make a shape of what is one; False if the
        elements of the operand are not known."""
        at, data = SHAPE_OPERANDS[op], inputs[0]
        elements = self.of(inputs[at])
        if elements is None or elements.ndim != 1:
            return isinstance(inputs[at], relax.ShapeExpr | GenericConst)
        if isinstance(inputs[at], GenericConst) and not (op == "Expand" and _is_symbolic(data)):
            return True
        extents = elements.tolist()
        if op == "Reshape":  # 0 copies
            extents = [
                data.ty.shape[i] if isinstance(e, int) and e == 0 else e
                for i, e in enumerate(extents)
            ]
        if op == "Expand" and isinstance(data.ty.shape, relax.ShapeExpr):
            extents = [1] * (data.ty.ndim - len(extents)) + extents
            inputs[0] = _checked(bb, data, extents[len(extents) - data.ty.ndim :])
        inputs[at] = relax.ShapeExpr(extents)
        return True


def _checked(bb: relax.BlockBuilder, data: relax.Expr, extents: list[Any]) -> relax.Expr:
    """`data`, with a check at run time of the dimensions that Expand leaves as they are.

    TVM's broadcast_to reads outside of a dimension that is neither 1 by its type nor the extent.
    """
    have, analyzer = list(data.ty.shape), tvm.sym.Analyzer()
    wanted = [
        h if _is_one(h) or _is_one(e) or (isinstance(e, int) and e == -1) else e
        for h, e in zip(have, extents, strict=True)
    ]
    if all(analyzer.can_prove_equal(h, w) for h, w in zip(have, wanted, strict=True)):
        return data
    return bb.match_cast(data, relax.TensorType(wanted, str(data.ty.dtype)))


def _is_symbolic(data: relax.Expr) -> bool:
    shape = data.ty.shape
    return isinstance(shape, relax.ShapeExpr) and not all(isinstance(e, tirx.IntImm) for e in shape)


def _is_one(extent: Any) -> bool:
    return isinstance(extent, int | tirx.IntImm) and int(extent) == 1


def _elements(values: Any) -> Elements:
    """Constants become Python's."""
    listed = values if isinstance(values, list) else [values]
    array = np.empty(len(listed), object)
    array[:] = [v.value if isinstance(v, tirx.IntImm) else v for v in listed]
    return array if isinstance(values, list) else array.reshape(())


def _arithmetic(op: Callable[[Any, Any], Any]) -> Callable[..., Elements]:
    def rule(_: Mapping[str, Any], a: Elements, b: Elements) -> Elements:
        a, b = np.broadcast_arrays(a, b)
        made = [_simplified(op(x, y)) for x, y in zip(a.flat, b.flat, strict=True)]
        return _elements(made).reshape(a.shape)

    return rule


def _simplified(value: Any) -> Any:
    return value if isinstance(value, int) else tvm.sym.Analyzer().simplify(value)


def _divided(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return tirx.truncdiv(a, b)


def _equal(a: Any, b: Any) -> bool:
    """A dimension is no negative number; else what depends on it is not known."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if tvm_ffi.structural_equal(a, b):
        return True
    number, other = (a, b) if isinstance(a, int) else (b, a)
    if isinstance(number, int) and number < 0 and isinstance(other, tirx.Var):
        return False
    raise ValueError("not known")


def _gather(attrs: Mapping[str, Any], data: Elements, index: Elements) -> Elements | None:
    if attrs.get("axis", 0) not in (0, -1) or data.ndim != 1:
        return None
    return _elements(data[index.astype(int)].tolist() if index.ndim else data[int(index[()])])


def _slice(
    _: Mapping[str, Any],
    data: Elements,
    start: Elements,
    end: Elements,
    axes: Elements | None = None,
    step: Elements | None = None,
) -> Elements:
    return data[slice(int(start[0]), int(end[0]), 1 if step is None else int(step[0]))]


def _cast(attrs: Mapping[str, Any], data: Elements) -> Elements | None:
    return data if attrs.get("to") in _ONNX_INTEGERS else None


def _reshape(_: Mapping[str, Any], data: Elements, shape: Elements) -> Elements:
    return data.reshape([int(extent) for extent in shape])


_RULES: dict[str, Callable[..., Elements | None]] = {
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda attrs, *parts: np.concatenate(parts),
    "Unsqueeze": lambda attrs, data, *axes: data.reshape(1) if data.ndim == 0 else None,
    "Squeeze": lambda attrs, data, *axes: data.reshape(()),
    "Reshape": _reshape,
    "Cast": _cast,
    "Identity": lambda attrs, data: data,
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Div": _arithmetic(_divided),
    "Equal": _arithmetic(_equal),
    "Where": lambda attrs, chosen, a, b: np.where(chosen.astype(bool), a, b),
}
