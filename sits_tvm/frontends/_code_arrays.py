"""Arrays of weights in NumPy, of which 4-bit codes stay apart from what turns them into floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from sits_tvm.frontends._stored_codes import StoredCodes

_GROUP_SIZES = (-1, 128, 64, 32)
ON_BITS: dict[str, Callable[..., np.ndarray]] = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "right_shift": np.right_shift,
    "left_shift": np.left_shift,
    "floor_divide": np.floor_divide,
    "floor_mod": np.mod,
}
ARITHMETIC = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}


class NotCodes(Exception):
    """Not codes and their parameters; the message says why."""


@dataclass(frozen=True)
class Codes:
    """(codes - zero) * scale, the three of one shape; scale None is 1."""

    codes: np.ndarray
    zero: np.ndarray
    scale: np.ndarray | None = None

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Codes:
        scale = None if self.scale is None else move(self.scale)
        return Codes(move(self.codes), move(self.zero), scale)

    @property
    def values(self) -> np.ndarray:
        steps = self.codes.astype("float32") - self.zero
        return steps if self.scale is None else steps * self.scale


def move_of(name: str, call: relax.Call) -> Callable[[np.ndarray], np.ndarray]:
    """An op that only moves elements, in NumPy."""
    shape = [int(extent) for extent in call.ty.shape]
    if name in ("reshape", "expand_dims", "squeeze"):
        return lambda x: x.reshape(shape)
    if name == "broadcast_to":
        return lambda x: np.broadcast_to(x, shape)
    if name == "permute_dims":
        axes = call.attrs.axes
        return lambda x: np.transpose(x, None if axes is None else [int(a) for a in axes])
    if name == "repeat" and call.attrs.axis is not None:
        return lambda x: np.repeat(x, int(call.attrs.repeats), axis=int(call.attrs.axis))
    if name == "strided_slice":
        axes, *limits = ([int(e.value) for e in arg.fields] for arg in call.args[1:])
        index: list[slice] = [slice(None)] * len(shape)
        for i, axis in enumerate(axes):
            index[axis] = slice(*(limit[i] for limit in limits))
        return lambda x: x[tuple(index)]
    raise NotCodes(f"R.{name} is on the way")


def concat(parts: list[Any], call: relax.Call) -> np.ndarray | Codes:
    axis = int(call.attrs.axis)
    if not any(isinstance(part, Codes) for part in parts):
        return np.concatenate(parts, axis=axis)
    if not all(isinstance(part, Codes) and part.scale is None for part in parts):
        raise NotCodes("it joins codes that have scales of their own")
    joined = [np.concatenate([getattr(p, f) for p in parts], axis) for f in ("codes", "zero")]
    return Codes(*joined)


def cast(x: np.ndarray | Codes, dtype: str) -> np.ndarray | Codes:
    if isinstance(x, Codes):
        kept = "float" in dtype or np.array_equal(x.values.astype(dtype), x.values)
        return x if kept else x.values.astype(dtype)
    if x.dtype.kind in "iub" and "float" in dtype:
        return Codes(x, np.zeros(x.shape, "float32"))
    return x.astype(dtype)


def arithmetic(name: str, a: Any, b: Any) -> np.ndarray | Codes:
    """Codes minus a zero point, and times a scale, are codes."""
    if not isinstance(a, Codes) and not isinstance(b, Codes):
        made = ARITHMETIC[name](a, b)
        zeros = name == "subtract" and a.dtype.kind in "iu" and b.ndim > 0
        if zeros and np.array_equal(made, a.astype("int64") - b):  # bytes may wrap around
            return arithmetic(name, Codes(a, np.zeros(a.shape, "float32")), b)
        return made
    if not isinstance(a, Codes) or (isinstance(b, Codes) and b.codes.size > a.codes.size):
        a, b = b, a
        if name == "subtract":
            raise NotCodes("codes are subtracted from a number")
    other = b.values if isinstance(b, Codes) else b.astype("float32")
    if a.scale is not None or np.broadcast_shapes(a.codes.shape, other.shape) != a.codes.shape:
        raise NotCodes(f"R.{name} follows the multiplication by the scale")
    if name == "multiply":
        kept = b if not isinstance(b, Codes) and b.dtype == "float16" else other
        return Codes(a.codes, a.zero, np.broadcast_to(kept, a.codes.shape))
    return Codes(a.codes, a.zero + other if name == "subtract" else a.zero - other)


def stored_codes(weight: np.ndarray | Codes) -> StoredCodes:
    """Codes 0…15 of W[n, k], from an operand (k, n)."""
    if not isinstance(weight, Codes) or weight.codes.ndim != 2:
        raise NotCodes("it is no matrix of codes")
    codes, zero = weight.codes.T.astype("int64"), weight.zero.T
    scale = np.ones(codes.shape, "float32") if weight.scale is None else weight.scale.T
    offset = 8 if codes.min() < 0 else 0
    codes, zero = codes + offset, zero + offset
    if not np.isfinite(scale).all():
        raise NotCodes("a scale is not finite")
    if codes.min() < 0 or codes.max() > 15:
        found = f"{codes.min() - offset}…{codes.max() - offset}"
        raise NotCodes(f"its codes are {found}, more than 4 bits")
    if not np.isin(zero, np.arange(16)).all():
        raise NotCodes("a zero point is no code 0…15")
    for size in _GROUP_SIZES:
        parts = [_per_group(part, size) for part in (scale, zero)]
        if parts[0] is not None and parts[1] is not None:
            return StoredCodes.of(codes.astype("uint8"), parts[0], parts[1].astype("uint8"), size)
    raise NotCodes("its scales are not of groups of 32 or more input channels")


def _per_group(values: np.ndarray, size: int) -> np.ndarray | None:
    """(n, k) as (n, groups), where the values of each group are equal."""
    k = values.shape[1]
    width = k if size == -1 else size
    first = np.ascontiguousarray(values[:, ::width])
    return first if np.array_equal(np.repeat(first, width, axis=1)[:, :k], values) else None
