"""A Hugging Face model as an ExportedProgram of (input_ids[, attention_mask]). Imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import PretrainedConfig, PreTrainedModel

from ..diagnostics import Diagnostic, SitsError, emit
from ._hf_attention import NotExpressible, Sites, sites_of

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Forward(nn.Module):
    """`model` with one tensor as result. The model is not a submodule, so its names stay."""

    def __init__(self, model: PreTrainedModel, logits_to_keep: int) -> None:
        super().__init__()
        self._modules, self._parameters = model._modules, model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.config = model.config.get_text_config()
        self._call, self._keep = model.forward, logits_to_keep
        accepted = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        self._slices = logits_to_keep > 0
        if self._slices and "logits_to_keep" in accepted:
            self._options["logits_to_keep"], self._slices = logits_to_keep, False

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        inputs = {} if attention_mask is None else {"attention_mask": attention_mask}
        out = self._call(input_ids=input_ids, **inputs, **self._options)
        out = out.logits if hasattr(out, "logits") else out.last_hidden_state
        if not self._slices:
            return out
        if out.ndim != 3:
            raise ValueError(f"logits_to_keep needs (b, s, n) logits, not {tuple(out.shape)}")
        return out[:, -self._keep :]


def export(model: PreTrainedModel, logits_to_keep: int, max_seq_len: int | None) -> ExportedProgram:
    """The model traced with one attention op per layer, or else as transformers writes it.

    Emits a note that says why in the second case. Raises SitsError if torch cannot trace it.
    """
    tokens = _tokens(model, max_seq_len)
    forward = Forward(model, logits_to_keep)
    with torch.no_grad(), _evaluation(model):
        expected = _trial(forward, tokens)
        try:
            with sites_of(lambda: forward(tokens), model) as sites:
                _check(sites, model, forward(tokens), expected)
                return _trace(forward, {"input_ids": tokens}, max_seq_len)
        except NotExpressible as reason:
            _note(model, reason)
        inputs = {"input_ids": tokens}
        if "attention_mask" in inspect.signature(model.forward).parameters:
            inputs["attention_mask"] = torch.ones_like(tokens)
        return _trace(forward, inputs, max_seq_len)


def _trial(forward: Forward, tokens: Tensor) -> Tensor:
    try:
        return forward(tokens)
    except Exception as error:
        message = f"the model does not run on input_ids alone: {type(error).__name__}: {error}"
        _refuse("model-not-supported", message)


def _check(sites: Sites, model: PreTrainedModel, found: Tensor, expected: Tensor) -> None:
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if not sites.by_module or len(sites.by_module) != layers:
        count = f"{len(sites.by_module)} of {layers} layers"
        raise NotExpressible(f"{count} compute attention through transformers' interface")
    if not all(site.mask.causal for site in sites.by_module.values()):
        raise NotExpressible("its attention is not causal, so padding needs a mask")
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error <= _TOLERANCE.get(expected.dtype, 1e-4):
        raise NotExpressible(f"a trial run differs by {error:.1e} from transformers' attention")


def _trace(forward: Forward, inputs: dict[str, Tensor], longest: int | None) -> ExportedProgram:
    """Symbolic batch and sequence, bounded where the model or `longest` bounds it."""
    positions = _max_positions(forward.config)
    bounds = dict.fromkeys([longest, min(longest or positions, positions)])
    dims = [(Dim("b", min=1), Dim("s", min=1, max=bound)) for bound in bounds]
    for attempt in [*dims, (Dim.AUTO, Dim.AUTO(max=longest))]:
        try:
            return _export(forward, inputs, attempt)
        except Exception as error:
            failure = error
    lines = [line for line in str(failure).splitlines() if line.strip()]
    _refuse("export-failed", f"torch.export: {type(failure).__name__}: {' '.join(lines[:3])}")


def _export(forward: Forward, inputs: dict[str, Tensor], dims: tuple) -> ExportedProgram:
    shapes = {name: dict(enumerate(dims)) for name in inputs}
    return torch.export.export(forward, (), inputs, dynamic_shapes=shapes, strict=False)


def _tokens(model: PreTrainedModel, longest: int | None) -> Tensor:
    """(2, ≤ 16) int64 ids: two sequences that differ, short enough for the model."""
    config = model.config.get_text_config()
    length = min(16, longest or 16, _max_positions(config))
    tokens = torch.arange(2 * length, device=model.device).mul(7).add(3)
    return tokens.remainder(config.vocab_size).view(2, length)


def _max_positions(config: PretrainedConfig) -> int:
    return getattr(config, "max_position_embeddings", None) or 1 << 20


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _note(model: PreTrainedModel, reason: NotExpressible) -> None:
    message = f"{type(model).__name__} keeps the attention and masks of transformers: {reason}"
    emit(Diagnostic.note("attention-not-recognised", message, function="main"))


def _refuse(code: str, message: str) -> NoReturn:
    advice = "export the model with its own inputs and shapes, then from_torch(exported_program)"
    raise SitsError([Diagnostic.error(code, message, help=advice)])
