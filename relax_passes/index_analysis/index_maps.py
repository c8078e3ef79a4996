"""Which element of which tensor a chain of views reads, exactly, for symbolic shapes."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, tirx

from relax_passes._tensors import Lookup, resolve, shape_of
from relax_passes.index_analysis.index_domain import Domain, Index
from relax_passes.index_analysis.index_values import IndexValues

__all__ = ["Lookup", "View", "view_of"]


@dataclass(frozen=True)
class View:
    """Element [axes] of a tensor is source[indices].

    Attributes
    ----------
    source : relax.Expr
        The tensor that no view computes: a variable where it has one.
    axes : tuple of tirx.Var
        One int64 variable per dimension of the view.
    indices : tuple of PrimExpr
        One per dimension of `source`, over `axes` and the shape's variables.
    """

    source: relax.Expr
    axes: tuple[tirx.Var, ...]
    indices: tuple[Index, ...]


def view_of(expr: relax.Expr, lookup: Lookup) -> View:
    """Follow reshapes, permutations, slices and the like back to a tensor that is none.

    Parameters
    ----------
    expr : relax.Expr
        A tensor of known rank.
    lookup : Callable[[relax.Var], relax.Expr or None]
        What a variable is bound to, as `relax.analysis.get_var2val(function).get`.

    Returns
    -------
    View
        The identity where `expr` is no view. Indices are simplified as far as the axes' ranges
        prove it (an axis of extent 1 is 0); what is not simplified is still exact.

    Raises
    ------
    TypeError
        For an `expr` that is no tensor, or of unknown rank.
    """
    if not isinstance(expr.ty, relax.TensorType) or expr.ty.ndim < 0:
        raise TypeError(f"view_of takes a tensor of known rank, found {expr.ty}")
    domain, shape = Domain(), shape_of(expr)
    if shape is None:
        axes = tuple(tirx.Var(f"i{k}", "int64") for k in range(expr.ty.ndim))
        return View(expr, axes, axes)
    domain.note_shape(shape)
    axes = tuple(domain.axis(f"i{k}", dim) for k, dim in enumerate(shape))
    views = IndexValues(lookup, domain).views
    source, at = expr, [domain.simplify(axis) for axis in axes]
    while (step := views.step(resolve(source, lookup), at)) is not None:
        source, at = step
    return View(_named(source, lookup), axes, tuple(domain.simplify(index) for index in at))


def _named(source: relax.Expr, lookup: Lookup) -> relax.Expr:
    """The first of the variables that are bound to the same value."""
    while isinstance(source, relax.Var):
        bound = lookup(source)
        if not isinstance(bound, relax.Var):
            return source
        source = bound
    return source
