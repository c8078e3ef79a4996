"""Quotients on CUDA that are right to the last bit, and codes by them, without a call to divide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import approximate_reciprocal, fused_multiply_add, local
from ..int4_format.activation_format import SMALLEST_MAXIMUM, ActivationFormat, power_of_two

_VALUE = 1.5 * 2.0**23
"""A float32 whose neighbours count by one: added, it leaves an integer in the lowest bits."""

_SMALLEST = int(np.float32(SMALLEST_MAXIMUM).view("int32"))
_SMALL, _FACTOR = 2.0**-60, 2.0**40
_MANTISSA = (1 << 23) - 1
_REFLECTED = 254 << 23
"""Less the bits of a power of two, those of its reciprocal."""


@dataclass(frozen=True)
class Quotients:
    """Codes by a scale: x / scale to the last bit, and rounded to an integer, half to even.

    That takes the reciprocal to the last bit, the product with x, and the exact rest of that
    quotient: Markstein, "Computation of elementary functions on the IBM RISC System/6000" (1990).
    The rest must not underflow: x and scale of small parts are both multiplied by a power of two.
    Of columns that are not finite the scale is NaN.

    By a scale that is a power of two all that is the product with its reciprocal; there is no
    `divisor` then.
    """

    scale: tirx.Expr
    divisor: tirx.Expr | None
    reciprocal: tirx.Expr
    factor: tirx.Expr | None = None

    @staticmethod
    def by_scale(largest: tirx.Expr, dtype: str, form: ActivationFormat) -> Quotients:
        """From the bits of the largest magnitude of a part of `dtype`; as in `int8_matmul`."""
        bits = T.Bind(tirx.max(largest, tirx.const(_SMALLEST, "int32")))
        amax = T.Bind(tirx.reinterpret("float32", bits))
        most = tirx.const(form.largest, "float32")
        scale = _divide(amax, most, tirx.const(1.0 / form.largest, "float32"))
        if form.power_of_two:
            scale = T.Bind(power_of_two(scale))
            exponent = tirx.const(_REFLECTED, "int32") - tirx.reinterpret("int32", scale)
            return Quotients(scale, None, T.Bind(tirx.reinterpret("float32", exponent)))
        factor, divisor = None, scale
        if dtype != "float16":  # whose parts are zero or not that small
            one, more = tirx.const(1.0, "float32"), tirx.const(_FACTOR, "float32")
            is_small = amax < tirx.const(_SMALL, "float32")
            factor = T.Bind(T.Select(is_small, more, one))
            divisor = T.Bind(scale * factor)
        return Quotients(scale, divisor, _reciprocal(divisor), factor)

    def code(self, x: tirx.Expr) -> tirx.Expr:
        """Its code is the lowest byte."""
        x = x if self.factor is None else T.Bind(x * self.factor)
        if self.divisor is None:
            quotient = x * self.reciprocal
        else:
            quotient = _divide(x, self.divisor, self.reciprocal)
        return tirx.reinterpret("uint32", T.Bind(quotient + tirx.const(_VALUE, "float32")))


def _reciprocal(x: tirx.Expr) -> tirx.Expr:
    """To the last bit, without a call. Of a mantissa of ones the step may end one below."""
    registers, one = local(3), tirx.const(1.0, "float32")
    approximate_reciprocal(registers[0], x)
    fused_multiply_add(registers[1], -x, registers[0], one)
    fused_multiply_add(registers[2], registers[0], registers[1], registers[0])
    ones = tirx.const(_MANTISSA, "int32")
    is_ones = T.bitwise_and(tirx.reinterpret("int32", x), ones) == ones
    bits = tirx.reinterpret("int32", registers[2]) | T.Cast("int32", is_ones)
    return T.Bind(tirx.reinterpret("float32", bits))


def _divide(x: tirx.Expr, divisor: tirx.Expr, reciprocal: tirx.Expr) -> tirx.Expr:
    quotient, rest = local(1), local(1)
    T.buffer_store(quotient, x * reciprocal, [0])
    fused_multiply_add(rest[0], -divisor, quotient[0], x)
    fused_multiply_add(quotient[0], rest[0], reciprocal, quotient[0])
    return quotient[0]
