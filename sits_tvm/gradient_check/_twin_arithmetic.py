"""Elementwise ops and reductions of the torch twin.

A rule takes (call, arguments, points) and returns a tensor. `points` are the float arguments as
the compiled function saw them; a decision (a rounding, a mask, a comparison) is taken on them, so
that float32 noise in front of a step is not mistaken for a wrong gradient. Where two one-sided
derivatives differ the rules take PyTorch's choice: 0 for relu and abs at 0, half of each in a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import relax

Rule = Callable[[relax.Call, list[Any], list[Any]], Any]


def _torch() -> Any:
    import torch

    return torch


def dtype_of(name: object) -> Any:
    """The torch dtype that holds values of a TVM dtype exactly: float64, int64 or bool."""
    torch, text = _torch(), str(name)
    if "float" in text:
        return torch.float64
    return torch.bool if text == "bool" else torch.int64


def cast(x: Any, dtype: object) -> Any:
    return x.to(dtype_of(dtype))


def _unary(name: str) -> Rule:
    return lambda _call, args, _at: getattr(_torch(), name)(args[0])


def _binary(name: str) -> Rule:
    def rule(_call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
        return getattr(_torch(), name)(args[0], args[1])

    return rule


def _compare(name: str) -> Rule:
    return lambda _call, _args, at: getattr(_torch(), name)(at[0], at[1])


def _reduce(name: str) -> Rule:
    def rule(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
        axes = _axes(call.attrs.axis, args[0].ndim)
        return getattr(_torch(), name)(args[0], dim=axes, keepdim=bool(call.attrs.keepdims))

    return rule


def _axes(axis: Any, ndim: int) -> list[int]:
    if axis is None:
        return list(range(ndim))
    return [int(a) % ndim for a in axis]


def _variance(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    axes = _axes(call.attrs.axis, args[0].ndim)
    return args[0].var(dim=axes, correction=0, keepdim=bool(call.attrs.keepdims))


def _prod(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    out = args[0]
    for axis in sorted(_axes(call.attrs.axis, out.ndim), reverse=True):
        out = out.prod(dim=axis, keepdim=bool(call.attrs.keepdims))
    return out


def _divide(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    quotient = args[0] / args[1]
    return quotient if "float" in str(call.ty.dtype) else quotient.trunc().to(_torch().int64)


def _relu(_call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    return _torch().where(at[0] > 0, args[0], 0.0)


def _leaky_relu(call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    return _torch().where(at[0] > 0, args[0], args[0] * float(call.attrs.alpha))


def _abs(_call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    return args[0] * at[0].sign()


def _maximum(_call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    return _larger(args, at[0], at[1])


def _minimum(_call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    return _larger(args, at[1], at[0])


def _larger(args: list[Any], first: Any, second: Any) -> Any:
    """args[0] where first > second, args[1] where it is less; their mean in a tie."""
    where = _torch().where
    return where(first > second, args[0], where(first < second, args[1], (args[0] + args[1]) / 2))


def _cumsum(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    x = args[0].reshape(-1) if call.attrs.axis is None else args[0]
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    total = x.cumsum(axis)
    return total - x if call.attrs.exclusive else total


def _gelu_tanh(_call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    x = args[0]
    return 0.5 * x * (1 + _torch().tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_UNARY = [
    "exp",
    "log",
    "log2",
    "log1p",
    "sqrt",
    "rsqrt",
    "square",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "tanh",
    "asin",
    "acos",
    "atan",
    "asinh",
    "acosh",
    "atanh",
    "sigmoid",
    "erf",
    "negative",
    "logical_not",
]
_BINARY = ["add", "subtract", "multiply", "logical_and", "logical_or", "logical_xor"]
_COMPARE = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]
_TORCH_NAMES = {"equal": "eq", "not_equal": "ne"}

RULES: dict[str, Rule] = {
    **{name: _unary(name) for name in _UNARY},
    **{name: _binary(name) for name in _BINARY},
    **{name: _compare(_TORCH_NAMES.get(name, name)) for name in _COMPARE},
    "divide": _divide,
    "power": _binary("pow"),
    "maximum": _maximum,
    "minimum": _minimum,
    "abs": _abs,
    "sign": lambda _call, _args, at: at[0].double().sign(),
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "max": _reduce("amax"),
    "min": _reduce("amin"),
    "prod": _prod,
    "variance": _variance,
    "cumsum": _cumsum,
    "nn.relu": _relu,
    "nn.leakyrelu": _leaky_relu,
    "nn.silu": lambda _call, args, _at: args[0] * _torch().sigmoid(args[0]),
    "nn.gelu": lambda _call, args, _at: _torch().nn.functional.gelu(args[0]),
    "nn.gelu_tanh": _gelu_tanh,
}
