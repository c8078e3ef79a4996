"""Ops of the torch twin that make, move or select elements. Rules as in `_twin_arithmetic`."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ._twin_arithmetic import Rule, _torch, cast, dtype_of


def _permute_dims(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    axes = call.attrs.axes
    order = range(args[0].ndim)[::-1] if axes is None else [int(a) for a in axes]
    return args[0].permute(*order)


def _reshape(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return args[0].reshape(args[1])


def _expand_dims(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    x, axes = args[0], [int(a) for a in call.attrs.axis]
    rank = x.ndim + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    axes = call.attrs.axis
    return args[0].squeeze() if axes is None else args[0].squeeze([int(a) for a in axes])


def _concat(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return _torch().cat(list(args[0]), dim=int(call.attrs.axis))


def _split(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    axis, parts = int(call.attrs.axis), call.attrs.indices_or_sections
    if hasattr(parts, "__len__"):
        return list(_torch().tensor_split(args[0], [int(i) for i in parts], dim=axis))
    size = -(-args[0].shape[axis] // int(parts))
    return list(args[0].split(size, dim=axis))


def _strided_slice(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    x, axes, begin, end = args[:4]
    strides = args[4] if len(args) > 4 else [1] * len(axes)
    for axis, start, stop, step in zip(axes, begin, end, strides, strict=True):
        index = range(x.shape[axis])[slice(start, stop, step)]
        x = x.index_select(axis, _torch().tensor(list(index), dtype=_torch().int64))
    return x


def _take(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    """Outside the axis NaN, as `BoundTakeIndices` has it, unless the mode moves the index."""
    x, index = args[0], args[1].long()
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % x.ndim
    size, flat = x.shape[axis], index.reshape(-1)
    flat = flat % size if str(call.attrs.mode) == "wrap" else flat
    near = flat.clamp(0, size - 1)
    out = x.index_select(axis, near)
    if str(call.attrs.mode) == "fast" and not near.equal(flat):
        out = out.index_fill(axis, (near != flat).nonzero().reshape(-1), float("nan"))
    return out.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


def _gather_elements(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return args[0].gather(int(call.attrs.axis), args[1].long())


def _where(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    condition = args[0] if args[0].dtype == _torch().bool else args[0] != 0
    return _torch().where(condition, args[1], args[2])


def _filled(value: float) -> Rule:
    def rule(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
        return _torch().full(_shape(args[0]), value, dtype=dtype_of(call.ty.dtype))

    return rule


def _full(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return cast(args[1], call.ty.dtype).expand(_shape(args[0])).clone()


def _shape(like: Any) -> list[int]:
    return list(like) if isinstance(like, list | tuple) else list(like.shape)


def _arange(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return _torch().arange(*args, dtype=dtype_of(call.ty.dtype))


def _repeat(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    axis = call.attrs.axis
    return args[0].repeat_interleave(
        int(call.attrs.repeats), dim=None if axis is None else int(axis)
    )


def _stack(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    axis = call.attrs.axis
    return _torch().stack(list(args[0]), dim=0 if axis is None else int(axis))


def _one_hot(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    hot = _torch().nn.functional.one_hot(args[0].long(), int(call.attrs.depth))
    return hot.movedim(-1, int(call.attrs.axis)) * (args[1] - args[2]) + args[2]


def _collapse_sum(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return args[0].sum_to_size(_shape(args[1]))


RULES: dict[str, Rule] = {
    "permute_dims": _permute_dims,
    "reshape": _reshape,
    "flatten": lambda _call, args, _at: args[0].reshape(-1),
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "concat": _concat,
    "split": _split,
    "stack": _stack,
    "strided_slice": _strided_slice,
    "take": _take,
    "gather_elements": _gather_elements,
    "where": _where,
    "broadcast_to": lambda _call, args, _at: args[0].expand(args[1]),
    "collapse_sum_to": _collapse_sum,
    "collapse_sum_like": _collapse_sum,
    "zeros": _filled(0),
    "zeros_like": _filled(0),
    "ones": _filled(1),
    "ones_like": _filled(1),
    "full": _full,
    "full_like": _full,
    "arange": _arange,
    "one_hot": _one_hot,
    "repeat": _repeat,
    "tile": lambda call, args, _at: args[0].tile([int(r) for r in call.attrs.repeats]),
    "flip": lambda call, args, _at: args[0].flip(int(call.attrs.axis)),
    "triu": lambda _call, args, _at: args[0].triu(args[1] if len(args) > 1 else 0),
    "tril": lambda _call, args, _at: args[0].tril(args[1] if len(args) > 1 else 0),
}
