"""Chains of reshapes, permutations and broadcasts that are one of them, a slice, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import relax, tirx
from tvm.relax import op as R
from tvm_ffi import structural_equal

from .._tensors import broadcast, resolve, shape_of
from ..canonical_attention.elements import flat, product
from ..index_analysis.index_domain import Domain, Index, is_integer
from ..index_analysis.index_values import IndexValues
from .rule import Outcome, Rule, Scope

_RESHAPES = ("expand_dims", "flatten", "reshape", "squeeze")
_MOVES = (*_RESHAPES, "broadcast_to", "permute_dims")
_PICKS = ("concat", "flip", "gather_elements", "repeat", "strided_slice", "take", "tile")
MOVES = frozenset(f"relax.{name}" for name in _MOVES)
VIEWS = MOVES | frozenset(f"relax.{name}" for name in _PICKS)
_MAX_CHAIN = 12
_IDENTITY = "its elements are those of {}, each in its place"


class Chain:
    """A tensor, and every tensor below that it is a view of.

    Attributes
    ----------
    axes : list of PrimExpr
        Of the tensor, in `domain`.
    below : list of (relax.Expr, list of PrimExpr)
        From the nearest to the deepest: the tensor is below[indices].
    """

    def __init__(self, expr: relax.Expr, scope: Scope) -> None:
        self.expr, self.shape, self.domain = expr, shape_of(expr) or [], Domain()
        self.domain.note_shape(self.shape)
        axes = [self.domain.axis(f"i{n}", dim) for n, dim in enumerate(self.shape)]
        self.axes: list[Index] = [self.domain.simplify(axis) for axis in axes]
        self.below = list(self._steps(IndexValues(scope.lookup, self.domain), scope))

    def _steps(self, values: IndexValues, scope: Scope) -> Iterator[tuple[relax.Expr, list[Index]]]:
        found = values.views.step(resolve(self.expr, scope.lookup), list(self.axes))
        while found is not None:
            source, at = found
            yield source, [self.domain.simplify(index) for index in at]
            found = values.views.step(resolve(source, scope.lookup), list(at))

    def is_same(self, a: Sequence[Index], b: Sequence[Index]) -> bool:
        return len(a) == len(b) and all(map(self.domain.is_equal, a, b))

    def order(
        self,
        dims: Sequence[Index],
        at: Sequence[Index],
        axes: Sequence[Index],
        extents: Sequence[Index],
    ) -> list[int] | None:
        """The permutation of a tensor of `dims` that has the element `at` at `axes`."""
        free, order = list(range(len(dims))), []
        for axis, extent in zip(axes, extents, strict=True):
            found = [
                n
                for n in free
                if structural_equal(dims[n], extent) and self.domain.is_equal(at[n], axis)
            ]
            if not found:
                return None
            order.append(found[0])
            free.remove(found[0])
        return None if free else order


def _look(call: relax.Call, scope: Scope) -> Outcome | None:
    if shape_of(call) is None:
        return None
    if call.op.name == "relax.take" and isinstance(call.args[1], tirx.IntImm):
        return _look_at_field(call, scope)
    if not _may_be_less(call, scope):
        return None
    source, length = _below_reshapes(call, scope)
    if length and structural_equal(source.ty, call.ty):
        return Outcome(_IDENTITY.format(_name(source)), source)
    if length > 1:
        whole = _reshaped(source, call.ty.shape)
        return Outcome(f"{length} reshapes of {_name(source)} are one", whole)
    return _look_at_indices(call, scope)


def _below_reshapes(call: relax.Call, scope: Scope) -> tuple[relax.Expr, int]:
    """The tensor below all reshapes, which keep the row-major order; and how many these are."""
    below: relax.Expr = call
    length, name, value = 0, call.op.name.removeprefix("relax."), call
    while name in _RESHAPES:
        below, length = value.args[0], length + 1
        name, value = scope.call(below)
    return below, length


def _look_at_indices(call: relax.Call, scope: Scope) -> Outcome | None:
    chain = Chain(call, scope)
    for source, at in reversed(chain.below):
        if chain.is_same(at, chain.axes) and structural_equal(source.ty, call.ty):
            return Outcome(_IDENTITY.format(_name(source)), source)
    if call.op.name not in MOVES:
        return None
    for length, (source, at) in reversed(list(enumerate(chain.below, 1))):
        one = _one_move(chain, source, at) if length > 1 else None
        if one is not None:
            name = one.op.name.removeprefix("relax.")
            return Outcome(f"{length} views of {_name(source)} are one {name}", one)
    return None


def _look_at_field(call: relax.Call, scope: Scope) -> Outcome | None:
    """A field of packed projections, x.unflatten(-1, (3, n))[..., 1, :], is a slice of x."""
    chain = Chain(call, scope)
    for source, at in reversed(chain.below[1:]):
        dims = shape_of(source)
        if dims is None or len(dims) != len(chain.shape):
            continue
        cut = [n for n, dim in enumerate(dims) if not structural_equal(dim, chain.shape[n])]
        others = [n for n in range(len(dims)) if n not in cut]
        if len(cut) != 1 or not chain.is_same(*([x[n] for n in others] for x in (at, chain.axes))):
            continue
        [axis] = cut
        begin, extent = chain.domain.simplify(at[axis] - chain.axes[axis]), chain.shape[axis]
        if is_integer(begin) and is_integer(extent):
            end = int(begin) + int(extent)
            value = R.strided_slice(source, cut, [int(begin)], [end], assume_inbound=True)
            return Outcome(f"elements {begin} to {end} of axis {axis} of {_name(source)}", value)
    return None


def _may_be_less(call: relax.Call, scope: Scope) -> bool:
    """Whether a tensor below has the same type, or is more than one move below."""
    below = call.args[0]
    for depth in range(_MAX_CHAIN):
        if structural_equal(below.ty, call.ty):
            return True
        name, value = scope.call(below)
        if f"relax.{name}" not in VIEWS or isinstance(value.args[0], relax.Tuple):
            return False
        if depth == 0 and call.op.name in MOVES and value.op.name in MOVES:
            return True
        below = value.args[0]
    return False


def _one_move(chain: Chain, source: relax.Expr, at: Sequence[Index]) -> relax.Call | None:
    """The reshape, permutation or broadcast of `source` that is the whole chain."""
    dims = shape_of(source)
    if dims is None:
        return None
    if _is_reshape(chain, dims, at):
        return _reshaped(source, chain.shape)
    order = chain.order(dims, at, chain.axes, chain.shape)
    if order is not None:
        return R.permute_dims(source, order)
    aligned = broadcast(source, chain.axes, chain.shape, chain.domain)
    is_broadcast = aligned is not None and chain.is_same(at, aligned)
    return R.broadcast_to(source, chain.shape) if is_broadcast else None


def _reshaped(source: relax.Expr, shape: Sequence[Index]) -> relax.Call:
    """A reshape; where it only inserts axes, in the form that fuses with what is before it."""
    kept, axes = list(shape_of(source) or []), []
    for axis, extent in enumerate(shape):
        if kept and structural_equal(kept[0], extent):
            del kept[0]
        elif is_integer(extent, 1):
            axes.append(axis)
    is_insertion = not kept and len(axes) + source.ty.ndim == len(shape)
    if is_insertion:
        return R.expand_dims(source, axes)
    # In a list of numbers, 0 would stand for the extent of `source`.
    return R.reshape(source, relax.ShapeExpr(list(shape)))


def _is_reshape(chain: Chain, dims: Sequence[Index], at: Sequence[Index]) -> bool:
    """Whether row-major places, and the numbers of elements, agree."""
    is_equal = chain.domain.is_equal
    return is_equal(flat(at, dims), flat(chain.axes, chain.shape)) and is_equal(
        product(dims), product(chain.shape)
    )


def _name(source: relax.Expr) -> str:
    return f"`{source.name}`" if isinstance(source, relax.Var) else "a constant"


VIEW_RULE = Rule("views", VIEWS, _look)
