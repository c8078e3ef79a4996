"""Let 4-bit arrays become TVM tensors, and come back, with their values.

TVM 0.27 allocates half a byte per element for an int4 tensor but copies whole bytes into it, so
that `relax.const`, `R.const` and `tvm.runtime.tensor` fail on every int4 array; reading one back
gives 14 for -2. Importing this module replaces `copyfrom` and `numpy` of `tvm.runtime.Tensor` by
ones that are right for int4 and uint4 and call TVM's for everything else.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from tvm.runtime import Tensor, _tensor

# NumPy has no 4-bit integers: what a tensor comes back as.
_READ_AS = {"int4": "int8", "uint4": "uint8"}
_copyfrom, _numpy = Tensor.copyfrom, Tensor.numpy


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """Two values of -8…15 per uint8, the first in the high nibble: TVM's order on the host."""
    nibbles = values.astype("int8").view("uint8").reshape(-1) & 15
    nibbles = np.pad(nibbles, (0, nibbles.size % 2))
    return nibbles[0::2] << 4 | nibbles[1::2]


def unpack_nibbles(packed: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The inverse of `pack_nibbles` for a tensor of `dtype` int4 (int8 out) or uint4 (uint8)."""
    nibbles = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
    values = nibbles[: int(np.prod(shape))].reshape(shape).astype(_READ_AS[dtype])
    return (values ^ 8) - 8 if dtype == "int4" else values


def _copy_from(self: Tensor, source: Any) -> Tensor:
    if str(self.dtype) not in _READ_AS or isinstance(source, Tensor):
        return _copyfrom(self, source)
    values = np.asarray(source)
    if values.shape != tuple(self.shape):
        raise ValueError(f"an array of shape {values.shape} for a tensor of shape {self.shape}")
    with np.errstate(invalid="ignore"):  # casts of NaN and Inf, refused below
        packed = pack_nibbles(values)
    _check_held(packed, values, str(self.dtype))
    address = packed.ctypes.data_as(ctypes.c_void_p)
    _tensor._ffi_api.TVMTensorCopyFromBytes(self, address, packed.nbytes)
    return self


def _check_held(packed: np.ndarray, values: np.ndarray, dtype: str) -> None:
    other = unpack_nibbles(packed, values.shape, dtype) != values.astype("float64")
    if other.any():
        low, high = (-8, 7) if dtype == "int4" else (0, 15)
        raise ValueError(f"{dtype} holds integers {low}…{high}, not {values[other][0]}")


def _to_numpy(self: Tensor) -> np.ndarray:
    dtype = str(self.dtype)
    if dtype not in _READ_AS:
        return _numpy(self)
    shape = tuple(self.shape)
    packed = np.empty((int(np.prod(shape)) + 1) // 2, dtype="uint8")
    address = packed.ctypes.data_as(ctypes.c_void_p)
    _tensor._ffi_api.TVMTensorCopyToBytes(self, address, packed.nbytes)
    return unpack_nibbles(packed, shape, dtype)


Tensor.copyfrom, Tensor.numpy = _copy_from, _to_numpy
