"""Weights computed in NumPy, of which 4-bit codes stay apart from what turns them into floats."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from sits_tvm.config import GROUP_SIZES

from .._values import is_power_of_two, static_shape
from .stored_codes import StoredCodes

_ELEMENTS_AT_ONCE = 1 << 20
ON_BITS: dict[str, Callable[..., np.ndarray]] = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "right_shift": np.right_shift,
    "left_shift": np.left_shift,
    "floor_divide": np.floor_divide,
    "floor_mod": np.mod,
}
_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    **ON_BITS,
    **{name: getattr(np, name) for name in ("add", "subtract", "multiply", "divide", "negative")},
    **{name: getattr(np, name) for name in ("abs", "equal", "not_equal", "less", "less_equal")},
    **{name: getattr(np, name) for name in ("greater", "greater_equal", "maximum", "minimum")},
    "where": np.where,
}
_LARGEST_ZERO = 255  # on the way to one in 0…15; sums of two are far from the limits of int16
_ON_CODES = ("add", "subtract", "multiply", "divide")


class NotCodes(Exception):
    """Not codes and their parameters; the message says why."""


@dataclass(frozen=True)
class Codes:
    """(codes - zero) * scale.

    Attributes
    ----------
    codes : int8 or uint8
    zero, scale
        Of a shape that broadcasts to that of the codes: int16; float16 or float32, None is 1.
    """

    codes: np.ndarray
    zero: np.ndarray
    scale: np.ndarray | None = None

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Codes:
        scale = None if self.scale is None else move(self.wide(self.scale))
        return Codes(move(self.codes), move(self.wide(self.zero)), scale)

    def wide(self, part: np.ndarray) -> np.ndarray:
        return np.broadcast_to(part, self.codes.shape)

    @property
    def values(self) -> np.ndarray:
        steps = self.codes.astype("float32") - self.zero
        return steps if self.scale is None else steps * self.scale


Array = np.ndarray | Codes


def apply(name: str, call: relax.Call, args: Sequence[Any]) -> Array:
    """What the op `name` makes of its tensors: arrays, codes, or, for a tuple, a list of them.

    Raises
    ------
    NotCodes
        If it leaves no codes of codes, or is not known.
    """
    if name == "astype":
        return _cast(args[0], str(call.ty.dtype))
    if name == "concat":
        return _concat(args[0], int(call.attrs.axis))
    if name == "stack":
        axis = int(call.attrs.axis or 0) % call.ty.ndim
        return _concat([_moved(part, lambda x: np.expand_dims(x, axis)) for part in args[0]], axis)
    if name == "dequantize":
        return _dequantized(args[0], args[1], args[2], int(call.attrs.axis))
    if name in _ON_CODES and _holds_codes(name, args):
        return _arithmetic(name, *args)
    if name in _ELEMENTWISE and not any(isinstance(a, Codes) for a in args):
        return _ELEMENTWISE[name](*args).astype(str(call.ty.dtype))
    if name == "take":
        return _take(args[0], args[1], int(call.attrs.axis or 0))
    if name in ("zeros", "ones", "full"):
        filling = args[0] if name == "full" else np.asarray(name == "ones")
        return np.full(_shape(call), filling, str(call.ty.dtype))
    if name == "slice_scatter":
        return _written(args[0], args[1], call)
    if name == "arange" and all(hasattr(limit, "value") for limit in call.args):
        return np.arange(*(limit.value for limit in call.args), dtype=str(call.ty.dtype))
    move = _move(name, call)
    return _moved(args[0], move)


def _moved(x: Array, move: Callable[[np.ndarray], np.ndarray]) -> Array:
    return x.moved(move) if isinstance(x, Codes) else move(x)


def _shape(call: relax.Call) -> list[int]:
    shape = static_shape(call)
    if shape is None:
        raise NotCodes(f"the shape of {call.op.name.replace('relax', 'R')} is symbolic")
    return shape


def _move(name: str, call: relax.Call) -> Callable[[np.ndarray], np.ndarray]:
    """An op that only moves elements, in NumPy."""
    attrs, shape = call.attrs, _shape(call)
    if name in ("reshape", "expand_dims", "squeeze"):
        return lambda x: x.reshape(shape)
    if name == "broadcast_to":
        return lambda x: np.broadcast_to(x, shape)
    if name == "permute_dims":
        return lambda x: np.transpose(x, attrs.axes and [int(a) for a in attrs.axes])
    if name == "repeat" and attrs.axis is not None:
        return lambda x: np.repeat(x, int(attrs.repeats), axis=int(attrs.axis))
    if name == "tile":
        return lambda x: np.tile(x, [int(count) for count in attrs.repeats])
    if name == "flip":
        return lambda x: np.flip(x, int(attrs.axis))
    if name == "strided_slice":
        axes, *limits = ([int(e.value) for e in arg.fields] for arg in call.args[1:])
        index: list[slice] = [slice(None)] * len(shape)
        for i, axis in enumerate(axes):
            index[axis] = slice(*(limit[i] for limit in limits))
        return operator.itemgetter(tuple(index))
    raise NotCodes(f"R.{name} is on the way")


def _concat(parts: Sequence[Any], axis: int) -> Array:
    if not any(isinstance(part, Codes) for part in parts):
        return np.concatenate(parts, axis=axis)
    if not all(isinstance(part, Codes) for part in parts):
        raise NotCodes("it joins codes and floats")
    scales = [part.scale for part in parts]
    if any(scale is not None for scale in scales):
        scales = [np.float16(1) if scale is None else scale for scale in scales]

    def joined(fields: list[Any]) -> np.ndarray:
        wide = [part.wide(field) for part, field in zip(parts, fields, strict=True)]
        return np.concatenate(wide, axis)

    codes, zeros = [part.codes for part in parts], [part.zero for part in parts]
    return Codes(joined(codes), joined(zeros), None if scales[0] is None else joined(scales))


def _take(x: Array, indices: np.ndarray, axis: int) -> Array:
    """Rows of `x`; of a table of whole numbers, codes."""
    extent = (x.codes if isinstance(x, Codes) else x).shape[axis]
    known = isinstance(indices, np.ndarray) and bool(indices.size)
    if not known or indices.min() < 0 or indices.max() >= extent:
        raise NotCodes("R.take reads outside of its table")
    if isinstance(x, Codes):
        return x.moved(lambda part: np.take(part, indices, axis))
    if x.ndim == 1 and x.dtype.kind not in "iub":
        whole = _whole(x, "int8")
        if whole is not None:
            return _cast(np.take(whole, indices), "float32")
    return np.take(x, indices, axis)


def _dequantized(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, axis: int) -> Codes:
    """R.dequantize; scale and zero point are of the tensor or along an axis."""
    along = [1] * codes.ndim
    along[axis] = -1
    scale, zero = (p.reshape(along) if p.size > 1 else p.reshape(()) for p in (scale, zero))
    made = _cast(codes, "float32")
    if not isinstance(made, Codes):
        raise NotCodes("its codes are wider than 8 bits")
    return _arithmetic("multiply", _arithmetic("subtract", made, zero), scale)


def _whole(x: np.ndarray, dtype: str) -> np.ndarray | None:
    """`x` as integers of `dtype`, where it holds only such."""
    with np.errstate(invalid="ignore"):
        whole = x.astype(dtype)
    return whole if np.array_equal(whole, x) else None


def _written(data: Array, source: Array, call: relax.Call) -> np.ndarray:
    if isinstance(data, Codes) or isinstance(source, Codes):
        raise NotCodes("R.slice_scatter is on the way")
    index: list[slice] = [slice(None)] * data.ndim
    index[int(call.attrs.axis)] = slice(*(int(limit.value) for limit in call.args[2:5]))
    out = data.copy()
    out[tuple(index)] = source
    return out


def _cast(x: Array, dtype: str) -> Array:
    if isinstance(x, Codes):
        kept = "float" in dtype or np.array_equal(x.values.astype(dtype), x.values)
        return x if kept else x.values.astype(dtype)
    narrow = _narrow(x) if x.dtype.kind in "iub" and "float" in dtype else None
    return x.astype(dtype) if narrow is None else Codes(narrow, np.zeros((), "int16"))


def _narrow(x: np.ndarray) -> np.ndarray | None:
    """Integers in a byte each, where they fit."""
    for dtype in ("uint8", "int8"):
        bounds = np.iinfo(dtype)
        if x.size and bounds.min <= x.min() and x.max() <= bounds.max:
            return x.astype(dtype, copy=False)
    return None


def _holds_codes(name: str, args: Sequence[Any]) -> bool:
    """Whether an operand is, or integers minus zero points, whose bytes do not wrap around, are."""
    a, b = args
    if isinstance(a, Codes) or isinstance(b, Codes):
        return True
    if name != "subtract" or a.dtype.kind not in "iu" or b.ndim == 0 or _narrow(a) is None:
        return False
    exact = "int32" if max(a.itemsize, b.itemsize) < 4 else "int64"
    return np.array_equal(a - b, np.subtract(a, b, dtype=exact, casting="unsafe"))


def _arithmetic(name: str, a: Any, b: Any) -> Codes:
    """Codes minus a zero point, and times a scale, are codes."""
    if name == "subtract" and not isinstance(a, Codes) and not isinstance(b, Codes):
        a = _cast(a, "float32")
    if not isinstance(a, Codes) or (isinstance(b, Codes) and b.codes.size > a.codes.size):
        a, b = b, a
        if name in ("subtract", "divide"):
            raise NotCodes(f"R.{name} has the codes on its right")
    assert isinstance(a, Codes)
    other = b.values if isinstance(b, Codes) else b
    if a.scale is not None or np.broadcast_shapes(a.codes.shape, other.shape) != a.codes.shape:
        raise NotCodes(f"R.{name} follows the multiplication by the scale")
    if name == "divide":
        if not is_power_of_two(np.abs(other)):
            raise NotCodes("it is divided by scales that are no powers of two")
        other = (1 / other).astype(other.dtype)
    if name in ("multiply", "divide"):
        return Codes(a.codes, a.zero, other if other.dtype == "float16" else _float32(other))
    zero = _whole(other, "int16")
    if zero is None:
        raise NotCodes("a zero point is no code 0…15")
    zero = a.zero + zero if name == "subtract" else a.zero - zero
    if zero.size and max(zero.max(), -zero.min()) > _LARGEST_ZERO:
        raise NotCodes("a zero point is no code 0…15")
    return Codes(a.codes, zero)


def _float32(x: np.ndarray) -> np.ndarray:
    return x.astype("float32", copy=False)


def stored_codes(weight: Array) -> StoredCodes:
    """Codes 0…15 of W[n, k]."""
    if not isinstance(weight, Codes) or weight.codes.ndim != 2 or not weight.codes.size:
        raise NotCodes("it is no matrix of codes")
    low, high = int(weight.codes.min()), int(weight.codes.max())
    offset = 8 if low < 0 else 0
    if low + offset < 0 or high + offset > 15:
        raise NotCodes(f"its codes are {low}…{high}, more than 4 bits")
    scale = np.float32(1) if weight.scale is None else weight.scale
    parts = [weight.wide(part) for part in (np.asarray(scale), weight.zero)]
    size = next(
        (s for s in reversed(GROUP_SIZES) if all(_has_groups(part, s) for part in parts)), None
    )
    if size is None:
        raise NotCodes("its scales are not of groups of 32 or more input channels")
    scale, zero = (np.ascontiguousarray(part[:, :: _width(part, size)]) for part in parts)
    zero = zero + offset
    if not np.isfinite(scale).all():
        raise NotCodes("a scale is not finite")
    if not np.isin(zero, np.arange(16)).all():
        raise NotCodes("a zero point is no code 0…15")
    codes = np.ascontiguousarray(weight.codes).view("uint8") + np.uint8(offset)
    return StoredCodes.of(codes, scale, zero.astype("uint8"), size)


def _width(values: np.ndarray, size: int) -> int:
    return values.shape[1] if size == -1 else size


def _has_groups(values: np.ndarray, size: int) -> bool:
    """Whether values (n, k) are equal within each group."""
    k, width = values.shape[1], _width(values, size)
    blocks = (values[rows] for rows in _blocks(values))
    return all(
        np.array_equal(np.repeat(block[:, ::width], width, axis=1)[:, :k], block)
        for block in blocks
    )


def _blocks(values: np.ndarray) -> Iterator[slice]:
    """Rows, a few at a time."""
    step = max(1, _ELEMENTS_AT_ONCE // values.shape[1])
    return (slice(i, i + step) for i in range(0, len(values), step))
