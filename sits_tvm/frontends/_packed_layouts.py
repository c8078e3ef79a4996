"""How GPTQ, AWQ and compressed-tensors lay 4-bit weights out in the tensors of a layer.

Of a linear layer W[n, k] with groups along k, and eight codes to an int32, low nibble first:

- GPTQ: qweight (k / 8, n), scales (groups, n), qzeros (groups, n / 8), g_idx (k) the group of each
  column. Zero points are stored minus one ("gptq", what AutoGPTQ writes) or as they are ("gptq_v2",
  GPTQModel).
- AWQ, version GEMM: qweight (k, n / 8), scales (groups, n), qzeros (groups, n / 8); nibble i of a
  word is column ``_AWQ_ORDER[i]`` of its eight.
- compressed-tensors, pack-quantized: weight_packed (n, k / 8), weight_scale (n, groups),
  weight_zero_point (n / 8, groups), weight_shape. Codes and zero points are stored plus 8.
  weight_g_idx as g_idx; -1 in it stands for neighbours.

Act-order groups columns by how large their activations are: g_idx is no staircase, and codes are
put into the order of their groups, see `StoredCodes.columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from relax_passes.packed_weights.stored_codes import StoredCodes

from ._stored_codes import nibbles

Arrays = Mapping[str, np.ndarray]
Reader: TypeAlias = "Callable[[Arrays, dict[str, Any]], StoredCodes]"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _gptq(tensors: Arrays, options: dict[str, Any]) -> StoredCodes:
    words, zeros, scale = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    _expect_words(qweight=words, qzeros=zeros)
    codes = nibbles(words.T)
    stored = nibbles(zeros)
    zero = stored + _minus_one(stored, options)
    if zero.max() > 15:
        raise ValueError("a stored zero point of 15 stands for 16, which is no 4-bit code")
    if options.get("sym") and not (zero == 8).all():
        raise ValueError('quantization_config has "sym": true, but zero points are not all 8')
    groups = tensors["g_idx"] if options.get("desc_act") else tensors.get("g_idx")
    return _assembled(codes, scale.T, zero.T, options["group_size"], groups)


def _minus_one(stored: np.ndarray, options: dict[str, Any]) -> int:
    """1 where zero points are stored minus one; symmetric ones tell it without a format."""
    format_ = options.get("checkpoint_format")
    if format_ is None and options.get("sym") and (stored == stored.flat[0]).all():
        format_ = {7: "gptq", 8: "gptq_v2"}.get(int(stored.flat[0]))
    if format_ is None:
        raise ValueError(
            "quantization_config has no checkpoint_format, which says how zero points are stored: "
            'write "gptq" (minus one, as AutoGPTQ does) or "gptq_v2" (as they are)'
        )
    return int(format_ == "gptq")


def _awq(tensors: Arrays, options: dict[str, Any]) -> StoredCodes:
    words, scale = tensors["qweight"], tensors["scales"]
    _expect_words(qweight=words)
    codes = _in_columns(words).T
    zero = np.full(scale.shape, 8, "uint8")
    if options.get("zero_point", True):
        _expect_words(qzeros=tensors["qzeros"])
        zero = _in_columns(tensors["qzeros"])
    return _assembled(codes, scale.T, zero.T, options["group_size"])


def _in_columns(words: np.ndarray) -> np.ndarray:
    """(rows, n / 8) words of AWQ to (rows, n) codes."""
    stored = nibbles(words).reshape(*words.shape, 8)
    columns = np.empty_like(stored)
    columns[:, :, _AWQ_ORDER] = stored
    return columns.reshape(len(words), -1)


def _compressed(tensors: Arrays, options: dict[str, Any]) -> StoredCodes:
    words, scale = tensors["weight_packed"], tensors["weight_scale"]
    _expect_words(weight_packed=words)
    n, k = (int(extent) for extent in tensors["weight_shape"])
    codes = nibbles(words)
    if (len(words), words.shape[1]) != (n, -(-k // 8)):
        raise ValueError(f"weight_packed {words.shape} does not hold weight_shape {(n, k)}")
    by_activation = options.get("actorder") in (True, "group")
    groups = tensors["weight_g_idx"] if by_activation else tensors.get("weight_g_idx")
    if groups is not None and (groups == -1).any():
        groups = None
    zero = np.full(scale.shape, 8, "uint8")
    if not options.get("symmetric", True):
        stored = tensors["weight_zero_point"]
        _expect_words(weight_zero_point=stored)
        zero = nibbles(stored.T)[:, :n].T
    return _assembled(codes[:, :k], scale, zero, options["group_size"], groups)


def _assembled(
    codes: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    group_size: int,
    groups: np.ndarray | None = None,
) -> StoredCodes:
    """Checked for shapes and dtypes; bfloat16 scales are float32. `groups`: of each column."""
    n, k = codes.shape
    shape = (n, 1 if group_size == -1 else -(-k // group_size))
    if scale.shape != shape or zero.shape != shape:
        raise ValueError(
            f"{n} x {k} codes in groups of {group_size} need {shape} scales and zero points; found "
            f"{scale.shape} and {zero.shape}"
        )
    if scale.dtype.name not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"its scales are {scale.dtype}, not floats")
    scale = scale if scale.dtype == "float16" else scale.astype("float32")
    columns = None if groups is None else _columns(groups, group_size, k)
    codes = codes if columns is None else codes[:, columns]
    codes, scale, zero = (np.ascontiguousarray(part) for part in (codes, scale, zero))
    return StoredCodes.of(codes, scale, zero, group_size, columns)


def _expect_words(**arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        if array.dtype != "int32" or array.ndim != 2:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, not a matrix of int32 words")


def _columns(groups: np.ndarray, group_size: int, k: int) -> np.ndarray | None:
    """Columns by their group; None where neighbours are grouped already."""
    wanted = np.arange(k) // (k if group_size == -1 else group_size)
    if np.array_equal(groups, wanted):
        return None
    columns = np.argsort(groups, axis=None, kind="stable")
    if groups.shape != (k,) or not np.array_equal(groups[columns], wanted):
        raise ValueError(
            f"g_idx {groups.shape} does not give {group_size} of its {k} columns to each group"
        )
    return columns


# quant_method: the suffix of its codes, and their reader
METHODS: dict[str, tuple[str, Reader]] = {
    "gptq": (".qweight", _gptq),
    "awq": (".qweight", _awq),
    "compressed-tensors": (".weight_packed", _compressed),
}
