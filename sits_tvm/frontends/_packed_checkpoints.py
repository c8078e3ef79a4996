"""4-bit checkpoints of GPTQ, AWQ and compressed-tensors: codes, scales and zero points, exactly.

Read without the packages that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tvm.runtime import Tensor

from relax_passes.packed_weights.stored_codes import StoredCodes

from .._safetensors import read_safetensors
from ..diagnostics import Diagnostic, SitsError, raise_errors
from ._packed_layouts import METHODS, Arrays, Reader

_FLOAT = "pass the float model, with Config(quant=QuantSpec())"
_ADVICE = f"correct config.json, or {_FLOAT}"


def quantization_of(path: Path) -> dict[str, Any] | None:
    """The quantization that config.json of a directory declares."""
    config = json.loads((path / "config.json").read_text())
    keys = ("quantization_config", "compression_config") if isinstance(config, dict) else ()
    for key in keys:
        declared = config.get(key)
        if declared and not (isinstance(declared, dict) and _is_name(declared.get("quant_method"))):
            found = f"{path}: {key} in config.json is {str(declared)[:80]}"
            _refuse(found, 'write a table with a name as "quant_method"')
        if declared:
            return declared
    return None


def _is_name(value: object) -> bool:
    return value is None or isinstance(value, str)


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
    if method not in METHODS:
        _refuse(
            f"{path}: quantization_config has quant_method={method!r}; read are 4-bit weights of "
            f"{', '.join(METHODS)}",
            _FLOAT,
        )
    suffix, read = METHODS[method]
    options = _checked(path, method, declared)
    tensors: dict[str, Tensor] = {}
    origin: dict[str, Path] = {}  # of a layer's codes
    for file in _files(path):
        read_here = read_safetensors(file)
        tensors |= read_here
        origin |= {n.removesuffix(suffix): file for n in read_here if n.endswith(suffix)}
    layers: dict[str, dict[str, np.ndarray]] = {layer: {} for layer in origin}
    if not layers:
        _refuse(f"{path}: no tensor *{suffix} in *.safetensors", "check quantization_config")
    others = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if layer in layers and part != "bias":
            layers[layer][part] = tensor.numpy()
        else:
            others[name] = tensor
    return others, _read_layers(layers, origin, options, read)


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
    layers: Mapping[str, Arrays],
    origin: Mapping[str, Path],
    options: dict[str, Any],
    read: Reader,
) -> dict[str, StoredCodes]:
    stored: dict[str, StoredCodes] = {}
    wrong: dict[str, list[str]] = {}
    for layer, tensors in layers.items():
        try:
            _expect_finite(tensors)
            stored[f"{layer}.weight"] = read(tensors, options)
        except (KeyError, ValueError) as error:
            message = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            wrong.setdefault(message, []).append(layer)
    raise_errors(
        [
            Diagnostic.error(
                "packed-checkpoint", f"{origin[names[0]]}: {_some(names)}: {message}", help=_ADVICE
            )
            for message, names in wrong.items()
        ]
    )
    return stored


def _expect_finite(tensors: Arrays) -> None:
    for name, array in tensors.items():
        if array.dtype.kind not in "iub" and not np.isfinite(array.astype("float32")).all():
            raise ValueError(f"{name} holds NaN or infinite values")


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
    format_, groups = declared.get("format"), declared.get("config_groups", {})
    groups = [*groups.values()] if isinstance(groups, dict) else []
    if not all(isinstance(g, dict) and isinstance(g.get("weights"), dict) for g in groups):
        _refuse(f"{where} has config_groups={groups}", "give a group with a table of weights")
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


def _refuse(found: str, advice: str) -> NoReturn:
    raise SitsError([Diagnostic.error("packed-checkpoint", found, help=advice)])
