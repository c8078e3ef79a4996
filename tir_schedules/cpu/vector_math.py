"""float32 exp, expm1, tanh, sigmoid, erf and small powers as arithmetic that LLVM vectorises.

TVM hands these to libm one lane at a time: sixteen calls where sixteen lanes would do. Largest
error against float64, in units of the last place, where the result is normal: exp 1.2, sigmoid
2.3, tanh 2.8, erf 2.7. NaN, infinities and denormal results of exp are those of libm; sigmoid has
no denormal results, tanh(-0.0) is 0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.tirx import Expr

_LOG2_E = 1.4426950408889634
# ln 2 in two parts; n * _LN2_HIGH is exact for |n| < 2**15.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440054690583e-4
# Adding 1.5 * 2**23 rounds a float32 to an integer, which is then its low bits.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000
# erf(x) = x * polynomial(x * x) for |x| < 1: the Taylor series.
_ERF_SERIES = [1.1283791670955126 * (-1) ** k / (factorial(k) * (2 * k + 1)) for k in range(11)]
# erfc(x) = e**(-x * x) * polynomial(1 / (1 + x / 2)) for 1 <= x <= 4: a Chebyshev fit of degree 7
# to math.erfc, relative error 1.5e-9.
_ERFC_FIT = [
    -1.4648144335e-4, 0.28479586102, 0.26044014110, 0.34512448097,
    -9.7931875936e-2, 0.55609498966, -0.46620517555, 0.11787027917,
]  # fmt: skip


def vectorizable_math(node: tirx.Stmt | Expr) -> tirx.Stmt | Expr:
    """`node` with every call named above replaced, in float32 or (through float32) float16.

    Powers are replaced where the exponent is a constant 2, 3 or 4. sinh and cosh, of which TVM
    makes vectors that it then has no code for, become the calls of libm that it makes of scalars.
    Other calls stay.
    """
    return tvm_ffi.structural_map(node, (Call, _replace), order="post")


def _replace(call: Call) -> Expr:
    name = getattr(call.op, "name", "")
    if name == "tirx.pow":
        return _replace_power(call)
    if name in _LIBM:
        return _scalar_call(call)
    if name not in _REPLACEMENTS or str(call.ty.dtype) not in ("float32", "float16"):
        return call
    result = _REPLACEMENTS[name](call.args[0].astype("float32"))
    return result.astype(str(call.ty.dtype))


def _replace_power(call: Call) -> Expr:
    base, exponent = call.args
    if isinstance(exponent, tirx.FloatImm) and exponent.value in (2.0, 3.0, 4.0):
        return _let(base, lambda x: _power(x, int(exponent.value)))
    return call


def _scalar_call(call: Call) -> Expr:
    """The call of libm, which `VectorizeLoop` leaves one lane at a time."""
    dtype = str(call.ty.dtype)
    if dtype not in _LIBM_SUFFIX:
        return call
    name = call.op.name.removeprefix("tirx.") + _LIBM_SUFFIX[dtype]
    return tirx.call_pure_extern(dtype, name, *call.args)


def exp(x: Expr) -> Expr:
    """e**x of a float32 expression: 2**n * e**r with |r| <= ln(2) / 2."""
    return _exp_in_range(_clip(x, -104.0, 89.0))


def _exp_in_range(x: Expr) -> Expr:
    def scaled(n: Expr, r: Expr) -> Expr:
        half = n >> _like(1, n)
        return (_expm1_reduced(r) + 1.0) * _power_of_two(half) * _power_of_two(n - half)

    return _reduce(x, scaled)


def exp_nonpositive(x: Expr) -> Expr:
    """e**x of a float32 expression that is at most 0, or NaN; 0 where that is below e**-87."""

    def scaled(n: Expr, r: Expr) -> Expr:
        return (_expm1_reduced(r) + 1.0) * _power_of_two(n)

    return _let(x, lambda x: tirx.Select(x < _like(-87.0, x), _like(0.0, x), _reduce(x, scaled)))


def expm1(x: Expr) -> Expr:
    """e**x - 1 of a float32 expression, for |x| < 80."""

    def scaled(n: Expr, r: Expr) -> Expr:
        return _expm1_reduced(r) * _power_of_two(n) + (_power_of_two(n) - 1.0)

    return _reduce(x, scaled)


def tanh(x: Expr) -> Expr:
    """Hyperbolic tangent of a float32 expression."""
    return _let(expm1(_clip(x, -10.0, 10.0) * 2.0), lambda t: t / (t + 2.0))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e**-x) of a float32 expression."""
    return _like(1.0, x) / (exp(_like(0.0, x) - x) + 1.0)


def erf(x: Expr) -> Expr:
    """Error function of a float32 expression."""

    def joined(x: Expr) -> Expr:
        small = x * _horner(x * x, _ERF_SERIES)
        fit = _let(1.0 / (tirx.abs(x) * 0.5 + 1.0), lambda t: _horner(t, _ERFC_FIT))
        sign = tirx.Select(x < _like(0.0, x), _like(-1.0, x), _like(1.0, x))
        large = (1.0 - _exp_in_range(_like(0.0, x) - x * x) * fit) * sign
        return tirx.Select(tirx.abs(x) < _like(1.0, x), small, large)

    return _let(_clip(x, -4.0, 4.0), joined)


def _reduce(x: Expr, scaled: Callable[[Expr, Expr], Expr]) -> Expr:
    """scaled(int32 n, r) where x = n * ln 2 + r."""

    def remainder(x: Expr, shifted: Expr) -> Expr:
        n = shifted - _ROUND
        bits = tirx.reinterpret("int32", shifted) - tirx.const(_ROUND_BITS, "int32")
        return _let(x - n * _LN2_HIGH - n * _LN2_LOW, lambda r: scaled(bits, r))

    return _let(x, lambda x: _let(x * _LOG2_E + _ROUND, lambda shifted: remainder(x, shifted)))


def _expm1_reduced(r: Expr) -> Expr:
    """e**r - 1 for |r| <= 0.35: the Taylor series to r**7 (the next term is 5e-9)."""
    return _horner(r, [1.0 / factorial(k) for k in range(1, 8)]) * r


def _power_of_two(n: Expr) -> Expr:
    return tirx.reinterpret("float32", (n + _like(127, n)) << _like(23, n))


def _clip(x: Expr, low: float, high: float) -> Expr:
    """Clamp that lets NaN through, which min and max do not."""
    return _let(x, lambda x: tirx.Select(
        x > _like(high, x), _like(high, x), tirx.Select(x < _like(low, x), _like(low, x), x)
    ))  # fmt: skip


def _horner(x: Expr, coefficients: list[float]) -> Expr:
    value = _like(coefficients[-1], x)
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + _like(coefficient, x)
    return value


def _power(x: Expr, exponent: int) -> Expr:
    square = x * x
    return {2: square, 3: square * x, 4: square * square}[exponent]


def _like(value: float, x: Expr) -> Expr:
    return tirx.const(value, x.ty.dtype)


def _let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """Name a value that is used more than once. Each nested Let doubles the time of TVM's passes,
    so what LLVM finds again by itself (differences, shifts) gets no name."""
    if isinstance(value, tirx.Var):
        return body(value)
    var = tirx.Var("t", value.ty.dtype)
    return tirx.Let(var, value, body(var))


_LIBM, _LIBM_SUFFIX = ("tirx.sinh", "tirx.cosh"), {"float32": "f", "float64": ""}
_REPLACEMENTS = {"tirx.exp": exp, "tirx.tanh": tanh, "tirx.sigmoid": sigmoid, "tirx.erf": erf}
