"""4-bit checkpoints of GPTQ, AWQ and compressed-tensors: codes, scales and zero points, exactly.

Read without the packages that wrote them. Layouts, of a linear layer W[n, k] with groups along k
and eight codes to an int32, low nibble first:

- GPTQ: qweight (k / 8, n), scales (groups, n), qzeros (groups, n / 8), g_idx (k) the group of each
  column. Zero points are stored minus one ("gptq", what AutoGPTQ writes) or as they are ("gptq_v2",
  GPTQModel).
- AWQ, version GEMM: qweight (k, n / 8), scales (groups, n), qzeros (groups, n / 8); nibble i of a
  word is column ``_AWQ_ORDER[i]`` of its eight.
- compressed-tensors, pack-quantized: weight_packed (n, k / 8), weight_scale (n, groups),
  weight_zero_point (n / 8, groups), weight_shape. Codes and zero points are stored plus 8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tvm.runtime import Tensor

from sits_tvm._safetensors import read_safetensors
from sits_tvm.diagnostics import Diagnostic, SitsError, raise_errors
from sits_tvm.frontends._stored_codes import StoredCodes, nibbles

Arrays = Mapping[str, np.ndarray]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_ADVICE = "correct config.json, or pass the float model and --int4"


def quantization_of(path: Path) -> dict[str, Any] | None:
    """The quantization that config.json of a directory declares."""
    config = json.loads((path / "config.json").read_text())
    return config.get("quantization_config") or config.get("compression_config")


def read_packed(path: Path) -> tuple[dict[str, Tensor], dict[str, StoredCodes]]:
    """The other tensors, and the weights that are codes, of a directory, by name.

    Raises
    ------
    SitsError
        For a method, a format or options that are not read, saying which are; with every layer
        whose tensors do not fit together.
    """
    declared = quantization_of(path)
    assert declared is not None
    method = declared.get("quant_method")
    if method not in _METHODS:
        _refuse(
            f"{path}: quantization_config has quant_method={method!r}; read are 4-bit weights of "
            f"{', '.join(_METHODS)}",
            "pass the float model and --int4",
        )
    suffix, read = _METHODS[method]
    options = _checked(path, method, declared)
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        tensors |= read_safetensors(file)
    layers: dict[str, dict[str, np.ndarray]] = {
        name.removesuffix(suffix): {} for name in tensors if name.endswith(suffix)
    }
    if not layers:
        _refuse(f"{path}: no tensor *{suffix} in *.safetensors", "check quantization_config")
    others = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if layer in layers and part != "bias":
            layers[layer][part] = tensor.numpy()
        else:
            others[name] = tensor
    return others, _read_layers(layers, options, read)


def _files(path: Path) -> list[Path]:
    """Of the weights, as transformers chooses them among others that lie there."""
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    indices = sorted(path.glob("*.safetensors.index.json"))
    if indices:
        return [
            path / n for n in sorted({*json.loads(indices[0].read_text())["weight_map"].values()})
        ]
    files = sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        found = f"{path} has {', '.join(file.name for file in files)}, and no index of them"
        _refuse(found, "add model.safetensors.index.json, or leave one file")
    return files


def _read_layers(
    layers: Mapping[str, Arrays], options: dict[str, Any], read: Callable[..., StoredCodes]
) -> dict[str, StoredCodes]:
    stored: dict[str, StoredCodes] = {}
    wrong: dict[str, list[str]] = {}
    for layer, tensors in layers.items():
        try:
            stored[f"{layer}.weight"] = read(tensors, options)
        except (KeyError, ValueError) as error:
            message = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            wrong.setdefault(message, []).append(layer)
    raise_errors(
        [
            Diagnostic.error("packed-checkpoint", f"{_some(names)}: {message}", help=_ADVICE)
            for message, names in wrong.items()
        ]
    )
    return stored


def _some(layers: list[str]) -> str:
    more = f" and {len(layers) - 1} more" if layers[1:] else ""
    return f"`{layers[0]}`{more}"


def _checked(path: Path, method: str, declared: dict[str, Any]) -> dict[str, Any]:
    """What the readers need of quantization_config."""
    where = f"{path}: quantization_config"
    options = dict(declared)
    if method == "compressed-tensors":
        options = _scheme(where, declared)
    bits = options.get("bits", options.get("w_bit"))
    if bits != 4:
        _refuse(f"{where} has {bits} bits", "give 4-bit weights, or the float model")
    size = options.get("group_size", options.get("q_group_size"))
    if not isinstance(size, int):
        _refuse(f"{where} has group_size={size!r}", "write the group_size it was made with")
    version = str(declared.get("version", "gemm")).lower()
    if method == "awq" and version != "gemm":
        _refuse(f"{where} has version={version!r}", 'quantize the float model with version="GEMM"')
    known = (None, "gptq", "gptq_v2")
    if method == "gptq" and declared.get("checkpoint_format") not in known:
        found = f"{where} has checkpoint_format={declared['checkpoint_format']!r}"
        _refuse(found, 'give a checkpoint in the format "gptq" or "gptq_v2"')
    return {**options, "group_size": size if size > 0 else -1}


def _scheme(where: str, declared: dict[str, Any]) -> dict[str, Any]:
    """The one scheme of compressed-tensors, with the words of the others."""
    format_, groups = declared.get("format"), list(declared.get("config_groups", {}).values())
    if format_ != "pack-quantized" or len(groups) != 1:
        found = f"{where} has format={format_!r} and {len(groups)} config_groups"
        _refuse(found, 'give a checkpoint with format="pack-quantized" and one group')
    weights = groups[0]["weights"]
    if groups[0].get("input_activations") is not None:
        _refuse(f"{where} quantizes activations, too", "give weight-only quantization (W4A16)")
    if weights.get("type", "int") != "int" or weights.get("strategy") not in ("group", "channel"):
        found = f"{where} has type={weights.get('type')!r}, strategy={weights.get('strategy')!r}"
        _refuse(found, 'give int weights with strategy="group" or "channel"')
    size = weights["group_size"] if weights["strategy"] == "group" else -1
    return {**weights, "bits": weights.get("num_bits"), "group_size": size}


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
    if "g_idx" in tensors:
        _expect_in_order(tensors["g_idx"], options["group_size"], codes.shape[1])
    return _assembled(codes, scale.T, zero.T, options["group_size"])


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
    if "weight_g_idx" in tensors:
        _expect_in_order(tensors["weight_g_idx"], options["group_size"], k)
    zero = np.full(scale.shape, 8, "uint8")
    if not options.get("symmetric", True):
        stored = tensors["weight_zero_point"]
        _expect_words(weight_zero_point=stored)
        zero = nibbles(stored.T)[:, :n].T
    return _assembled(codes[:, :k], scale, zero, options["group_size"])


def _assembled(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, group_size: int
) -> StoredCodes:
    """Checked for shapes and dtypes; bfloat16 scales are float32."""
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
    codes, scale, zero = (np.ascontiguousarray(part) for part in (codes, scale, zero))
    return StoredCodes.of(codes, scale, zero, group_size)


def _expect_words(**arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        if array.dtype != "int32" or array.ndim != 2:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, not a matrix of int32 words")


def _expect_in_order(groups: np.ndarray, group_size: int, k: int) -> None:
    """Groups are of neighbouring columns."""
    size = k if group_size == -1 else group_size
    if not np.array_equal(groups, np.arange(k) // size):
        raise ValueError(
            "its columns are grouped in the order of their activations (g_idx); an INT4 group is "
            "of neighbours (desc_act=False, or static groups)"
        )


def _refuse(found: str, advice: str) -> NoReturn:
    raise SitsError([Diagnostic.error("packed-checkpoint", found, help=advice)])


_METHODS: dict[str, tuple[str, Callable[[Arrays, dict[str, Any]], StoredCodes]]] = {
    "gptq": (".qweight", _gptq),
    "awq": (".qweight", _awq),
    "compressed-tensors": (".weight_packed", _compressed),
}
