"""Relax graphs evaluated op by op in torch, in the dtype of each: nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from attention_meaning import Says, definition
from torch import Tensor
from tvm import relax, tirx

Call, Env = relax.Call, dict


def evaluate(mod: tvm.IRModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of `main`, one dataflow block that returns a tensor or a tuple."""
    func = mod["main"]
    env: Env = {}
    for param, value in zip(func.params, inputs, strict=True):
        dims = zip(param.ty.shape, value.shape, strict=True)
        env |= {dim: size for dim, size in dims if not isinstance(dim, tirx.IntImm)}
        env[param] = value
    for block in func.body.blocks:
        for binding in block.bindings:
            env[binding.var] = value_of(binding.value, env)
    result = value_of(func.body.body, env)
    return list(result) if isinstance(result, tuple) else [result]


def value_of(expr: relax.Expr, env: Env) -> Any:
    if isinstance(expr, relax.Var):
        return env[expr]
    if isinstance(expr, relax.Tuple):
        return tuple(value_of(field, env) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return value_of(expr.tuple_value, env)[expr.index]
    if isinstance(expr, relax.ShapeExpr):
        return [size_of(dim, env) for dim in expr.values]
    if isinstance(expr, Call):
        args = [value_of(arg, env) for arg in expr.args]
        return _OPS[expr.op.name.removeprefix("relax.")](expr.attrs, *args)
    if isinstance(expr, tvm.ir.GenericConst):
        return torch.from_numpy(expr.value.numpy())
    return size_of(expr, env)


def size_of(dim: tvm.ir.Expr, env: Env) -> int | float:
    """A dimension or another scalar argument of an op."""
    if isinstance(dim, tirx.IntImm | tirx.FloatImm):
        return dim.value
    analyzer = tvm.sym.Analyzer()
    for var, size in env.items():
        if isinstance(size, int):
            analyzer.bind(var, tirx.IntImm("int64", size))
    return int(analyzer.simplify(dim))


def _dtype(attrs: Any) -> torch.dtype:
    return getattr(torch, str(attrs.dtype))


def _ints(values: Any) -> list[int]:
    return [int(v) for v in values]


def _repeat(attrs: Any, x: Tensor) -> Tensor:
    return x.repeat_interleave(int(attrs.repeats), int(attrs.axis))


def _tile(attrs: Any, x: Tensor) -> Tensor:
    return x.repeat(_ints(attrs.repeats))


def _expand_dims(attrs: Any, x: Tensor) -> Tensor:
    for axis in _ints(attrs.axis):
        x = x.unsqueeze(axis)
    return x


def _permute(attrs: Any, x: Tensor) -> Tensor:
    return x.permute(_ints(attrs.axes) if attrs.axes else list(range(x.ndim))[::-1])


def _attention(attrs: Any, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
    names = ("scale", "causal", "window", "softcap", "empty_row")
    says = Says(**{name: attrs[name] for name in names})
    return definition(says, q, k, v, *bias).to(q.dtype)


def _plain(function: Callable) -> Callable:
    return lambda _, *args: function(*args)


def _matmul(attrs: Any, a: Tensor, b: Tensor) -> Tensor:
    out = torch.promote_types(a.dtype, b.dtype)
    if attrs.out_dtype is not None:
        out = getattr(torch, str(attrs.out_dtype))
    return torch.matmul(a.to(out), b.to(out))


def _slice(attrs: Any, x: Tensor, axes: Any, begins: Any, ends: Any, *steps: Any) -> Tensor:
    for axis, begin, end in zip(axes, begins, ends, strict=True):
        places = range(x.shape[axis])[begin : min(end, x.shape[axis])]
        x = x.index_select(axis, torch.tensor(places[:: steps[0][0] if steps else 1]))
    return x


def _take(attrs: Any, x: Tensor, places: Tensor | int) -> Tensor:
    places = torch.as_tensor(places)
    axis, index = int(attrs.axis or 0), places.reshape(-1)
    shape = [*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]]
    return x.index_select(axis, index).reshape(shape)


def _reduced(function: Callable) -> Callable:
    return lambda attrs, x: function(x, _ints(attrs.axis), keepdim=bool(attrs.keepdims))


_PLAIN = {
    **{n: getattr(torch, n) for n in ("add", "subtract", "multiply", "divide", "where", "maximum")},
    **{n: getattr(torch, n) for n in ("logical_and", "logical_or", "logical_not", "isnan")},
    **{n: getattr(torch, n) for n in ("less", "less_equal", "greater", "greater_equal")},
    **{n: getattr(torch, n) for n in ("negative", "tanh", "cos", "exp", "sqrt", "abs")},
    "equal": torch.eq,
    "not_equal": torch.ne,
    "reshape": torch.reshape,
    "broadcast_to": torch.broadcast_to,
    "arange": lambda start, end, step: torch.arange(start, end, step),
}
_REDUCED = {"max": torch.amax, "min": torch.amin, "sum": torch.sum, "mean": torch.mean}
_OPS: dict[str, Callable] = {
    **{name: _plain(function) for name, function in _PLAIN.items()},
    "astype": lambda attrs, x: x.to(_dtype(attrs)),
    "matmul": _matmul,
    "permute_dims": _permute,
    "expand_dims": _expand_dims,
    "squeeze": lambda attrs, x: x.squeeze(tuple(_ints(attrs.axis))),
    "repeat": _repeat,
    "tile": _tile,
    "nn.softmax": lambda attrs, x: torch.softmax(x, int(attrs.axis)),
    "nn.log_softmax": lambda attrs, x: torch.log_softmax(x, int(attrs.axis)),
    **{name: _reduced(f) for name, f in _REDUCED.items()},
    "strided_slice": _slice,
    "take": _take,
    "concat": lambda attrs, parts: torch.cat(parts, int(attrs.axis)),
    "stack": lambda attrs, parts: torch.stack(parts, int(attrs.axis)),
    "flatten": lambda attrs, x: x.flatten(),
    "flip": lambda attrs, x: x.flip(int(attrs.axis)),
    "full": lambda attrs, shape, value: value.expand(shape),
    "zeros": lambda attrs, shape: torch.zeros(shape, dtype=_dtype(attrs)),
    "ones": lambda attrs, shape: torch.ones(shape, dtype=_dtype(attrs)),
    "tril": lambda attrs, x, diagonal: torch.tril(x, diagonal),
    "zeros_like": lambda attrs, x: torch.zeros_like(x),
    "sits.attention": _attention,
}
