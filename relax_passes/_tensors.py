"""Tensors of a function: their shapes, what computes them, how they broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax

from .index_analysis.index_domain import Domain, Index, integer, is_integer

Lookup = Callable[[relax.Var], relax.Expr | None]  # what a variable is bound to
Element = tuple[relax.Expr, list[Index]]  # a tensor and the place in it
# The integer at a place of an index tensor, None where it is not known.
ValueOf = Callable[[relax.Expr, Sequence[Index]], Index | None]


def shape_of(expr: relax.Expr) -> list[Index] | None:
    """The dimensions of a tensor, None where they are not known."""
    shape = getattr(expr.ty, "shape", None)
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None


def resolve(expr: relax.Expr, lookup: Lookup) -> relax.Expr:
    """What computes `expr`: bindings followed, tuples opened."""
    while True:
        if isinstance(expr, relax.TupleGetItem):
            fields = resolve(expr.tuple_value, lookup)
            if not isinstance(fields, relax.Tuple):
                return expr
            expr = fields.fields[expr.index]
        elif isinstance(expr, relax.Var):
            bound = lookup(expr)
            if bound is None:
                return expr
            expr = bound
        else:
            return expr


def broadcast(
    source: relax.Expr, indices: Sequence[Index], shape: Sequence[Index], domain: Domain
) -> list[Index] | None:
    """Where a tensor is read that is broadcast to `shape`; None where that is not proved."""
    dims = shape_of(source)
    if dims is None or len(dims) > len(shape):
        return None
    domain.note_shape(dims)
    skipped, result = len(shape) - len(dims), []
    for dim, index, full in zip(dims, indices[skipped:], shape[skipped:], strict=True):
        if is_integer(dim, 1):
            result.append(integer(0))
        elif domain.is_equal(dim, full):
            result.append(index)
        else:
            return None
    return result
