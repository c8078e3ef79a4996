"""What the gradient rules share: registration, and the shapes of partials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Op
from tvm.ir.op import register_op_attr
from tvm.relax import op as R

Rule = Callable[[relax.Var, relax.Call, relax.Expr, relax.BlockBuilder], list[relax.Expr]]
_TVM, _OURS = "FPrimalGradient", "sits.FPrimalGradient"
_LEVEL = 11  # TVM registers its own rules at 10
_HALF = ("float16", "bfloat16")


def gradient(
    *names: str, in_tvm: Callable[[Rule, Rule], Rule] | None = None
) -> Callable[[Rule], Rule]:
    """Register an FPrimalGradient for TVM's ops of these names, above TVM's own.

    A rule is ``(variable, call, output gradient, block builder) -> partials``, one per argument.
    Partials are built from ops that have gradients themselves, so that second order works.
    Where TVM's rule is as good, ``in_tvm(TVM's rule, ours)`` is that of `relax.transform.Gradient`,
    whose results stay what they are without this package; `rule_of` finds ours.
    """

    def register(rule: Rule) -> Rule:
        for name in (f"relax.{name}" for name in names):
            registered, tvms = rule, Op.get(name).get_attr(_TVM)
            if in_tvm is not None and tvms is not None:
                register_op_attr(name, _OURS, rule)
                registered = in_tvm(tvms, rule)
            register_op_attr(name, _TVM, registered, level=_LEVEL)
        return rule

    return register


def rule_of(op: Op) -> Rule | None:
    """The rule by which `differentiate` goes: ours before TVM's or a user's."""
    return op.get_attr(_OURS) or op.get_attr(_TVM)


def as_tvm(tvms: Rule, ours: Rule) -> Rule:
    """TVM's own rule: it chooses another value where there is a choice, or has fewer gradients."""
    return tvms


def as_tvm_where_static(tvms: Rule, ours: Rule) -> Rule:
    """TVM's own rule, but for symbolic shapes and half precision."""

    def rule(var: relax.Var, call: relax.Call, g: relax.Expr, bb: Any) -> list[relax.Expr]:
        plain = all(_is_static(x.ty) for x in (*call.args, var))
        return (tvms if plain else ours)(var, call, g, bb)

    return rule


def _is_static(ty: tvm.ir.Type) -> bool:
    if isinstance(ty, relax.TupleType):
        return all(map(_is_static, ty.fields))
    shape = ty.shape if isinstance(ty, relax.TensorType) else ty
    if isinstance(ty, relax.TensorType) and str(ty.dtype) in _HALF:
        return False
    lengths = getattr(shape, "values", [])
    return lengths is not None and all(isinstance(n, tvm.tirx.IntImm) for n in lengths)


def none(*args: relax.Expr) -> list[relax.Expr]:
    """The partials "no gradient" for these arguments."""
    return [R.grad.no_grad(arg) for arg in args]


def const(value: float, like: relax.Expr) -> relax.Expr:
    """A scalar of the dtype of `like`."""
    return relax.const(value, str(like.ty.dtype))


def dims(x: relax.Expr) -> list[tvm.ir.Expr]:
    """The shape of a tensor; ValueError where the type has none."""
    if not isinstance(x.ty, relax.TensorType) or not isinstance(x.ty.shape, relax.ShapeExpr):
        raise ValueError(f"the gradient needs a known shape, {x} is {x.ty}")
    return list(x.ty.shape)


def same(a: tvm.ir.Expr | int, b: tvm.ir.Expr | int) -> bool:
    """Whether two lengths are provably equal."""
    return tvm.sym.Analyzer().can_prove_equal(a, b)


def product(lengths: Sequence[tvm.ir.Expr]) -> tvm.ir.Expr:
    """Simplified; 1 of nothing."""
    total = tvm.tirx.IntImm("int64", 1)
    for length in lengths:
        total = total * length
    return tvm.sym.Analyzer().simplify(total)


def axes_of(axis: Any, ndim: int) -> list[int]:
    """Axes as sorted numbers from 0; None is all of them."""
    if axis is None:
        return list(range(ndim))
    listed = axis if isinstance(axis, list | tuple | tvm.ir.Array) else [axis]
    return sorted(int(a) % ndim for a in listed)


def reshape(bb: relax.BlockBuilder, x: relax.Expr, shape: Sequence[tvm.ir.Expr]) -> relax.Expr:
    """`x` itself where it has that shape already."""
    old = dims(x)
    if len(old) == len(shape) and all(map(same, old, shape)):
        return x
    return bb.emit(R.reshape(x, relax.ShapeExpr(list(shape))))


def cast(bb: relax.BlockBuilder, x: relax.Expr, dtype: object) -> relax.Expr:
    return x if x.ty.dtype == dtype else bb.emit(R.astype(x, str(dtype)))


def wide_sum(
    bb: relax.BlockBuilder, x: relax.Expr, axes: Sequence[int], keepdims: bool = False
) -> relax.Expr:
    """Sum in float32 at least, given back in the dtype of `x`."""
    wide = cast(bb, x, "float32") if str(x.ty.dtype) in _HALF else x
    return cast(bb, bb.emit(R.sum(wide, list(axes), keepdims)), x.ty.dtype)


def sum_to(bb: relax.BlockBuilder, grad: relax.Expr, like: relax.Expr) -> relax.Expr:
    """`grad` summed over the axes along which `like` was broadcast to it."""
    grad = bb.normalize(grad)
    have, want = dims(grad), dims(like)
    lead = len(have) - len(want)
    stretched = [lead + i for i, w in enumerate(want) if same(w, 1) and not same(have[lead + i], 1)]
    if lead or stretched:
        grad = wide_sum(bb, bb.emit(grad), [*range(lead), *stretched])
    return reshape(bb, grad, want)


def count(bb: relax.BlockBuilder, lengths: Sequence[tvm.ir.Expr], like: relax.Expr) -> relax.Expr:
    """The product of lengths as a scalar of the dtype of `like`; known at run time if symbolic."""
    total = product(lengths)
    if isinstance(total, tvm.tirx.IntImm):
        return const(int(total), like)
    one = bb.emit(R.arange(total, total + 1, 1, "int64"))
    return cast(bb, bb.emit(R.squeeze(one, [0])), like.ty.dtype)
