"""Read a chain of ops as quantization: from the multiplication by the scale back to the division.

Each op on the way becomes an `Event`; `range` then runs them forwards and says which
codes come out, or why the chain is another function than affine quantization.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm import relax

from .._values import Values, is_power_of_two, is_tensor
from .events import (
    CLIPS,
    MOVES,
    Chain,
    Event,
    Parameter,
    Refused,
    is_integer,
)

_OTHER_ROUNDING = {"floor": "down", "ceil": "up", "trunc": "towards zero"}
_ROUND_HELP = "write R.round, which rounds ties to even"


def chain_ends(values: Values, expr: relax.Expr) -> Iterator[tuple[relax.Expr, Chain]]:
    """(codes, an empty chain) for each way to see `expr` as codes times a scale."""
    name, call = values.call(expr)
    if call is None or not is_tensor(call):
        return
    if name == "multiply":
        for codes, scale in (call.args, reversed(call.args)):
            if rounds(values, codes):
                yield codes, Chain(Parameter(scale), words=[name])
    elif name == "divide" and rounds(values, call.args[0]):
        inverse = values.constant(call.args[1])
        if inverse is not None and is_power_of_two(inverse):
            yield call.args[0], Chain(Parameter(relax.const(1 / inverse)), words=[name])
    elif name == "dequantize" and rounds(values, call.args[0]):
        codes, scale, zero = call.args
        axis = int(call.attrs.axis)
        dtype = "uint32" if str(zero.ty.dtype) == "uint32" else "int32"
        subtract = Event("subtract", dtype, zero=Parameter(zero, axis))
        yield codes, Chain(Parameter(scale, axis), words=[name], events=[subtract])


def read_chain(values: Values, codes: relax.Expr, chain: Chain) -> None:
    """Fill `chain` from `codes` down to x. Raises Refused at the first op that does not fit."""
    name, call = values.call(codes)
    while name in ("astype", "add", "subtract", *CLIPS, *MOVES):
        codes = _read_step(values, name, call, chain)
        name, call = values.call(codes)
    if name == "quantize":
        _read_quantize(call, chain)
    elif name == "round":
        chain.note("round", Event("round"))
        _read_ratio(values, call.args[0], chain)
    else:
        raise _other_rounding(values, name, call)
    if chain.moved:
        message = f"R.{chain.moved} lies between the rounding and the multiplication by the scale"
        raise Refused("codes-moved", message, f"multiply by the scale first, R.{chain.moved} after")


def _read_step(values: Values, name: str, call: relax.Call, chain: Chain) -> relax.Expr:
    dtype, source = str(call.ty.dtype), call.args[0]
    if name == "astype":
        chain.note("cast", Event("cast", dtype))
        if is_integer(dtype) and not rounds(values, source):
            message = f"R.astype(…, {dtype!r}) rounds towards zero"
            raise Refused("other-rounding", message, "write R.astype(R.round(x / scale), …)")
    elif name in CLIPS:
        source, lo, hi = _clip(values, name, call)
        chain.note(name, Event("clip", lo=lo, hi=hi))
    elif name in MOVES:
        chain.note(name)
        chain.moved = name
    else:
        source, zero = call.args
        if name == "add" and not rounds(values, source):
            source, zero = zero, source
        chain.note(name, Event(name, dtype, zero=Parameter(zero)))
    return source


def _clip(values: Values, name: str, call: relax.Call) -> tuple[relax.Expr, float, float]:
    """What is clipped, and the bounds."""
    if name == "clip":
        source, low, high = call.args
        lo, hi = values.number(low), values.number(high)
    else:
        source, bound = call.args
        if values.number(source) is not None:
            source, bound = bound, source
        number = values.number(bound)
        lo, hi = (number, np.inf) if name == "maximum" else (-np.inf, number)
    if lo is None or hi is None:
        raise Refused("range-not-constant", f"a bound of R.{name} is not one constant number")
    return source, lo, hi


def _read_quantize(call: relax.Call, chain: Chain) -> None:
    """`R.quantize`: divides, rounds, adds the zero point, and saturates to its dtype."""
    dtype = str(call.ty.dtype)
    if not is_integer(dtype):
        raise Refused("not-integer", f"R.quantize to {dtype} does not round to integers")
    (x, scale, zero), axis, info = call.args, int(call.attrs.axis), np.iinfo(dtype)
    saturate = Event("clip", lo=info.min, hi=info.max)
    add = Event("add", "float32", zero=Parameter(zero, axis))
    chain.note("quantize", saturate, add, Event("round"))
    chain.x, chain.divisor = x, Parameter(scale, axis)


def _other_rounding(values: Values, name: str, call: Any) -> Refused:
    if name not in _OTHER_ROUNDING:
        return Refused("no-rounding", "no rounding")
    inner, half = values.call(call.args[0])
    if name == "floor" and inner == "add" and any(values.number(a) == 0.5 for a in half.args):
        message = "R.floor(x / scale + 0.5) rounds ties up, and other values up by its own addition"
        return Refused("other-rounding", message, _ROUND_HELP)
    return Refused("other-rounding", f"R.{name} rounds {_OTHER_ROUNDING[name]}", _ROUND_HELP)


def _read_ratio(values: Values, ratio: relax.Expr, chain: Chain) -> None:
    """What is rounded: x / scale, perhaps clipped first."""
    name, call = values.call(ratio)
    while name in CLIPS:
        ratio, lo, hi = _clip(values, name, call)
        chain.note(name, Event("clip", lo=lo, hi=hi))
        name, call = values.call(ratio)
    if name in ("add", "subtract"):
        raise Refused(
            "zero-point-before-rounding",
            "the sum x / scale + zero_point is rounded, which differs from rounding first at ties "
            "with an odd zero point, and where the sum itself is inexact",
            "write R.round(x / scale) + zero_point",
        )
    if name == "divide":
        chain.words.append(name)
        chain.x, chain.divisor = call.args[0], Parameter(call.args[1])
    elif name == "multiply":
        _read_reciprocal(values, call, chain)
    else:
        raise Refused("no-division", "what is rounded is not divided by the scale")


def _read_reciprocal(values: Values, call: relax.Call, chain: Chain) -> None:
    """x * (1 / scale), which is x / scale where the scale is a power of two."""
    for x, factor in (call.args, reversed(call.args)):
        name, inverse = values.call(factor)
        divides = name == "divide" and values.number(inverse.args[0]) == 1
        array = values.constant(inverse.args[1] if divides else factor)
        if array is None and not divides:
            continue
        if array is None or not is_power_of_two(array):
            known = "not a constant" if array is None else "no power of two"
            message = f"x * (1 / scale) rounds unlike x / scale: the scale is {known}"
            raise Refused("reciprocal", message, "write x / scale")
        chain.words.append("multiply by the reciprocal")
        scale = inverse.args[1] if divides else relax.const(1 / array)
        chain.x, chain.divisor = x, Parameter(scale)
        return
    raise Refused("no-division", "what is rounded is not divided by the scale")


def rounds(values: Values, expr: relax.Expr, depth: int = 12) -> bool:
    """Whether `expr` is a rounding, cast, clipped and shifted."""
    name, call = values.call(expr)
    if call is None or depth == 0 or not is_tensor(call):
        return False
    if name in ("round", "quantize", *_OTHER_ROUNDING):
        return True
    if name == "astype":
        source = call.args[0]
        truncates = "float" in str(source.ty.dtype) and is_integer(str(call.ty.dtype))
        return truncates or rounds(values, source, depth - 1)
    if name in ("add", "subtract", "minimum", "maximum"):
        return any(rounds(values, arg, depth - 1) for arg in call.args)
    return name in ("clip", *MOVES) and rounds(values, call.args[0], depth - 1)
