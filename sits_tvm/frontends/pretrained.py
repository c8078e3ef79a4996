"""`from_pretrained`: a Hugging Face model as a Relax module and its parameters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from tvm import IRModule, tirx

from relax_passes.packed_weights.stored_codes import StoredCodes

from ..diagnostics import Diagnostic, SitsError
from ..optional_packages import require
from ._loaded_weights import REPORTING, refuse_incomplete, warn_unused
from ._packed_checkpoints import quantization_of, read_packed
from ._stored_codes import with_stored_codes
from .gguf import load_gguf
from .torch import convert_exported_program, module_of

if TYPE_CHECKING:
    import torch
    import tvm
    from transformers import PretrainedConfig, PreTrainedModel

Loaded: TypeAlias = "tuple[PreTrainedModel, dict[str, StoredCodes]]"
_LOCAL = {"local_files_only": True, "trust_remote_code": False}  # nor is the user asked for trust
_DTYPES = ("float32", "float16", "bfloat16")


def from_pretrained(
    model_or_path: PreTrainedModel | str | Path,
    *,
    dtype: str | None = None,
    logits_to_keep: int = 0,
    max_seq_len: int | None = None,
) -> tuple[IRModule, dict[str, tvm.runtime.Tensor]]:
    """Import a Hugging Face model.

    A decoder whose layers all compute causal attention, windowed or not, becomes a function of
    ``input_ids`` alone with one `R.sits.attention` per layer. Any other model is imported as
    transformers writes it, as a function of ``input_ids`` and ``attention_mask``, with a note that
    says why.

    Parameters
    ----------
    model_or_path : transformers.PreTrainedModel, or path
        A model, a directory that `save_pretrained` wrote, or a GGUF file. Nothing is downloaded. A
        model is left as it was. 4-bit weights of GPTQ, AWQ and compressed-tensors directories, and
        Q4_0 tensors of a GGUF file, are codes in the module, which a build packs as they are;
        other GGUF types are dequantized.
    dtype : str, optional
        "float32", "float16" or "bfloat16". Default: that of the model; float32 for GGUF. For a
        model object in another dtype this makes a copy.
    logits_to_keep : int
        n > 0: the result at the last n positions only. 0: at all.
    max_seq_len : int, optional
        A promise that sequences are not longer, at least 2: memory is planned for it.

    Returns
    -------
    mod : IRModule
        ``main(input_ids[, attention_mask], *params)``, both int64 (b, s), symbolic and at least 1.
        Returns the logits (b, s, vocabulary), or for a model without a head the last hidden state
        (b, s, hidden).
    params : dict of str to tvm.runtime.Tensor
        By the model's own names; tied weights once, under the first. Memory is shared with the
        model. Codes have the name of their weight, and ``<weight>.scale`` and
        ``<weight>.zero_point`` beside them.

    Raises
    ------
    SitsError
        For a path, file or checkpoint that is missing, damaged or incomplete, a package that is
        not installed, a model that torch cannot export, and every op that has no converter.
    """
    _check_options(dtype, logits_to_keep, max_seq_len)
    for package in ("torch", "transformers"):
        require(package, "from_pretrained", "hf")
    from ._hf_attention import convert
    from ._hf_export import export

    model, stored = _model(model_or_path, dtype)
    program = export(model, logits_to_keep, max_seq_len)
    del model
    mod, params = convert_exported_program(program, {"attention.default": convert})
    return with_stored_codes(_name_dimensions(mod), params, stored)


def _name_dimensions(mod: IRModule) -> IRModule:
    """torch calls the dimensions s72 and s70, or the like; they are b and s."""
    main = mod["main"]
    dims = zip(main.params[0].ty.shape, ("b", "s"), strict=True)
    new = {old: tirx.Var(name, "int64") for old, name in dims if isinstance(old, tirx.Var)}
    names = {old.name: var.name for old, var in new.items()}
    main = main.bind_symbolic_vars(new)
    for key in ("tir_var_lower_bound", "tir_var_upper_bound"):
        if key in main.attrs:
            bounds = {names.get(name, name): bound for name, bound in main.attrs[key].items()}
            main = main.with_attr(key, bounds)
    return module_of(main)


def _check_options(dtype: str | None, logits_to_keep: int, max_seq_len: int | None) -> None:
    problems = []
    if dtype is not None and dtype not in _DTYPES:
        problems.append((f"dtype={dtype!r} is no dtype of a model", f"write {', '.join(_DTYPES)}"))
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        found = f"logits_to_keep={logits_to_keep!r} is no number of positions"
        problems.append((found, "write 0 for all, or a number"))
    if max_seq_len is not None and (not isinstance(max_seq_len, int) or max_seq_len < 2):
        found = f"max_seq_len={max_seq_len!r} is no length"
        problems.append((found, "write a number of at least 2, or None"))
    if problems:
        code = "from-pretrained-arguments"
        raise SitsError([Diagnostic.error(code, text, help=help_) for text, help_ in problems])


def _model(model_or_path: Any, dtype: str | None) -> Loaded:
    """The float model, and the weights that its file holds as codes."""
    import torch
    from transformers import PreTrainedModel

    wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
    if isinstance(model_or_path, str | Path):
        return _load(Path(model_or_path), wanted)
    if not isinstance(model_or_path, PreTrainedModel):
        found = f"expected a transformers model or a path, got {type(model_or_path)}"
        _refuse("not-a-model", found, "import other torch modules with from_torch")
    if wanted is None or model_or_path.dtype == wanted:
        return model_or_path, {}
    return copy.deepcopy(model_or_path).to(wanted), {}


def _load(path: Path, dtype: torch.dtype | None) -> Loaded:
    if path.is_dir():
        return _load_directory(path, dtype)
    if path.is_file():
        require("gguf", "from_pretrained with a GGUF file", "hf")
        return load_gguf(path, dtype)
    advice = "nothing is downloaded: fetch the model (hf download NAME --local-dir DIR), pass DIR"
    _refuse("path-missing", f"no file or directory {path}", advice)


def _load_directory(path: Path, dtype: torch.dtype | None) -> Loaded:
    import transformers

    _check_directory(path)
    stored: dict[str, StoredCodes] = {}
    try:
        packed = quantization_of(path) is not None
        config = transformers.AutoConfig.from_pretrained(path, **_LOCAL)
        _check_layers(path, config)
        names = getattr(config, "architectures", None) or ["AutoModel"]
        loader = getattr(transformers, names[0], transformers.AutoModel)
        source: dict[str, Any] = {"pretrained_model_name_or_path": path, "dtype": dtype or "auto"}
        if packed:
            others, stored = read_packed(path)
            source = _float_model(config, others, stored, dtype)
        model, loaded = loader.from_pretrained(**source, **_LOCAL, **REPORTING)
    except SitsError:
        raise
    except Exception as error:
        _refuse("model-not-loaded", f"{path}: {type(error).__name__}: {error}", _NOT_LOADED)
    refuse_incomplete(path, loaded)
    state = source.get("state_dict", {})
    unused = sorted(loaded["unexpected_keys"])
    warn_unused(path, [n for n in unused if n not in state or state[n].any()])
    return model, stored


def _check_layers(path: Path, config: PretrainedConfig) -> None:
    """Transformers makes the layers of config.json first, and reads their weights then."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    files = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if layers > sum(file.stat().st_size for file in files) // _LEAST_BYTES:
        found = f"{path}: config.json has {layers} layers, more than its weights have room for"
        _refuse("config-damaged", found, _ADVICE)


def _float_model(
    config: PretrainedConfig,
    others: dict[str, tvm.runtime.Tensor],
    stored: dict[str, StoredCodes],
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """What `from_pretrained` of transformers takes to make the model that codes stand for."""
    import torch

    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    state = {name: torch.from_dlpack(tensor).to(wanted) for name, tensor in others.items()}
    for name, weight in stored.items():
        state[name] = torch.from_numpy(weight.dequantized()).to(wanted)
    return {
        "pretrained_model_name_or_path": None,
        "config": config,
        "state_dict": state,
        "dtype": wanted,
    }


def _check_directory(path: Path) -> None:
    """config.json and every file of weights are there, and none is cut off."""
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file():
        advice = f"pass the file: {ggufs[0]}" if ggufs else _ADVICE
        _refuse("config-missing", f"{path} has no config.json", advice)
    index = next(iter(path.glob("*.safetensors.index.json")), None)
    if index is not None:
        try:
            needed = set(json.loads(index.read_text())["weight_map"].values())
            outside = [name for name in needed if Path(name).name != name]
        except (OSError, ValueError, LookupError, AttributeError, TypeError,
                RecursionError) as error:  # fmt: skip
            _refuse("index-damaged", f"{index}: {type(error).__name__}: {error}", _ADVICE)
        if outside:
            found = f"{index} names {min(outside)}, which is no file of the directory"
            _refuse("index-damaged", found, _ADVICE)
        missing = sorted(name for name in needed if not (path / name).is_file())
        if missing:
            _refuse("weights-missing", f"{path} lacks {', '.join(missing)}", _ADVICE)
    elif not [*path.glob("*.safetensors"), *path.glob("*.bin")]:
        _refuse("weights-missing", f"{path} has no *.safetensors", _ADVICE)


_LEAST_BYTES = 32  # of the weights of a layer
_ADVICE = "download the directory again, with config.json and every *.safetensors file"
_NOT_LOADED = f"see the message of transformers; if files are damaged, {_ADVICE}"


def _refuse(code: str, found: str, advice: str) -> NoReturn:
    raise SitsError([Diagnostic.error(code, found, help=advice)])
