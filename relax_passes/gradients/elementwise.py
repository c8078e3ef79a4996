"""Gradients of elementwise ops. Where TVM has a rule, ours reduces half precision in float32, keeps
symbolic shapes, and takes the derivative at a kink as torch does."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax
from tvm.ir import GenericConst
from tvm.relax import BlockBuilder as Builder
from tvm.relax import Expr
from tvm.relax import op as R

from ._rules import Rule, as_tvm, as_tvm_where_static, cast, const, gradient, none, sum_to


def _binary(name: str, in_tvm: Callable | None = None) -> Callable:
    """Register partials ``(x, y, z, g) -> (dx, dy)``, as they are before broadcasting is undone."""

    def register(partials: Callable[[Expr, Expr, Expr, Expr], tuple[Expr, Expr]]) -> Callable:
        @gradient(name, in_tvm=in_tvm)
        def rule(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
            x, y = call.args
            both = zip(partials(x, y, var, g), (x, y), strict=True)
            return [_for_argument(bb, partial, arg) for partial, arg in both]

        return partials

    return register


def _for_argument(bb: Builder, partial: Expr, arg: Expr) -> Expr:
    if isinstance(arg, GenericConst) or not isinstance(arg.ty, relax.TensorType):
        return none(arg)[0]
    return sum_to(bb, partial, arg)


@_binary("add", in_tvm=as_tvm_where_static)
def _add(x: Expr, y: Expr, z: Expr, g: Expr) -> tuple[Expr, Expr]:
    return g, g


@_binary("subtract", in_tvm=as_tvm_where_static)
def _subtract(x: Expr, y: Expr, z: Expr, g: Expr) -> tuple[Expr, Expr]:
    return g, R.negative(g)


@_binary("multiply", in_tvm=as_tvm_where_static)
def _multiply(x: Expr, y: Expr, z: Expr, g: Expr) -> tuple[Expr, Expr]:
    return R.multiply(g, y), R.multiply(g, x)


@_binary("divide", in_tvm=as_tvm_where_static)
def _divide(x: Expr, y: Expr, z: Expr, g: Expr) -> tuple[Expr, Expr]:
    return R.divide(g, y), R.negative(R.divide(R.multiply(g, z), y))


def _as_tvm_from_one(tvms: Rule, ours: Rule) -> Rule:
    """TVM's rule is NaN at x = 0 for other exponents than constants from 1 on."""
    static = as_tvm_where_static(tvms, ours)

    def rule(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
        exponent = call.args[1]
        right = isinstance(exponent, GenericConst) and (exponent.value.numpy() >= 1).all()
        return (static if right else ours)(var, call, g, bb)

    return rule


@_binary("power", in_tvm=_as_tvm_from_one)
def _power(x: Expr, y: Expr, z: Expr, g: Expr) -> tuple[Expr, Expr]:
    """dx = g y x^(y-1), 0 for y = 0; dy = g z ln x, 0 for x = 0."""
    zero, one = const(0, x), const(1, x)
    if isinstance(y, GenericConst) and y.ty.ndim == 0:
        exponent = float(y.value.numpy())
        power = R.power(x, const(exponent - 1, x)) if exponent not in (1.0, 2.0) else None
        slope = {0.0: zero, 1.0: one, 2.0: R.multiply(const(2, x), x)}.get(exponent)
        slope = R.multiply(const(exponent, x), power) if slope is None else slope
        return R.multiply(g, slope), zero
    slope = R.multiply(y, R.power(x, R.subtract(y, one)))
    dx = R.where(R.equal(y, zero), zero, R.multiply(g, slope))
    return dx, R.where(R.equal(x, zero), zero, R.multiply(R.multiply(g, z), R.log(x)))


@_binary("maximum")
def _maximum(x: Expr, y: Expr, z: Expr, g: Expr) -> tuple[Expr, Expr]:
    return _where_first(R.less(y, x), x, y, g), _where_first(R.less(x, y), x, y, g)


@_binary("minimum")
def _minimum(x: Expr, y: Expr, z: Expr, g: Expr) -> tuple[Expr, Expr]:
    return _where_first(R.less(x, y), x, y, g), _where_first(R.less(y, x), x, y, g)


def _where_first(is_first: Expr, x: Expr, y: Expr, g: Expr) -> Expr:
    """g where `is_first`, half of it in a tie."""
    zero = const(0, g)
    return R.where(is_first, g, R.where(R.equal(x, y), R.multiply(g, const(0.5, g)), zero))


@gradient("where")
def _where(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    condition, x, y = call.args
    zero = const(0, g)
    dx, dy = R.where(condition, g, zero), R.where(condition, zero, g)
    return [*none(condition), _for_argument(bb, dx, x), _for_argument(bb, dy, y)]


@gradient("astype")
def _astype(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """A cast to an integer has no gradient. That of an integer stays in the float dtype it has: the
    integer is a quantized code, and its gradient is none."""
    (x,) = call.args
    if not _is_float(var):
        return none(x)
    return [cast(bb, g, x.ty.dtype) if _is_float(x) else g]


def _is_float(x: Expr) -> bool:
    return str(x.ty.dtype).startswith(("float", "bfloat"))


def _plus(a: Expr, value: float) -> Expr:
    return R.add(a, const(value, a))


def _times(a: Expr, value: float) -> Expr:
    return R.multiply(a, const(value, a))


def _square(a: Expr) -> Expr:
    return R.multiply(a, a)


# dy/dx of (x, y)
_SLOPES: dict[str, Callable[[Expr, Expr, Callable[[Expr], Expr]], Expr]] = {
    "abs": lambda x, y, e: R.sign(x),
    "rsqrt": lambda x, y, e: _times(e(R.multiply(y, e(_square(y)))), -0.5),
    "square": lambda x, y, e: _times(x, 2.0),
    "erf": lambda x, y, e: _times(e(R.exp(R.negative(_square(x)))), 2 / math.sqrt(math.pi)),
    "tan": lambda x, y, e: _plus(e(_square(y)), 1.0),
    "asin": lambda x, y, e: R.rsqrt(R.subtract(const(1, x), _square(x))),
    "acos": lambda x, y, e: R.negative(R.rsqrt(R.subtract(const(1, x), _square(x)))),
    "atan": lambda x, y, e: R.divide(const(1, x), _plus(e(_square(x)), 1.0)),
    "asinh": lambda x, y, e: R.rsqrt(_plus(e(_square(x)), 1.0)),
    "acosh": lambda x, y, e: R.rsqrt(_plus(e(_square(x)), -1.0)),
    "atanh": lambda x, y, e: R.divide(const(1, x), R.subtract(const(1, x), _square(x))),
}


def _unary(name: str, slope: Callable) -> None:
    @gradient(name)
    def rule(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
        return [R.multiply(g, slope(call.args[0], var, bb.emit))]


for _name, _slope in _SLOPES.items():
    _unary(_name, _slope)


@gradient("nn.relu", in_tvm=as_tvm)
def _relu(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """0 at x = 0, as torch."""
    (x,) = call.args
    return [R.where(R.greater(x, const(0, x)), g, const(0, g))]


@gradient("nn.leakyrelu")
def _leakyrelu(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    (x,) = call.args
    return [R.where(R.greater(x, const(0, x)), g, _times(g, float(call.attrs.alpha)))]


@gradient("nn.softplus")
def _softplus(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """The identity above the threshold."""
    (x,) = call.args
    steep = bb.emit(_times(x, float(call.attrs.beta)))
    is_linear = R.greater(steep, const(float(call.attrs.threshold), x))
    return [R.where(is_linear, g, R.multiply(g, R.sigmoid(steep)))]
