"""Modules of torch.ao that fake-quantize: they look at flags in tensors, which no export can do.
Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize

from ..diagnostics import Diagnostic, raise_errors

_FORWARDS = (FakeQuantize.forward, FusedMovingAvgObsFakeQuantize.forward)


@contextmanager
def flags_as_they_are(module: torch.nn.Module) -> Iterator[None]:
    """Let them do what their flags say now.

    Raises
    ------
    SitsError
        With each that still observes: a call would change its scale.
    """
    found = {name: part for name, part in module.named_modules() if type(part).forward in _FORWARDS}
    help_ = "call model.apply(torch.ao.quantization.disable_observer) before"
    raise_errors(
        [
            Diagnostic.error("observer-enabled", f"`{name}` observes its input", help=help_)
            for name, part in found.items()
            if part.observer_enabled[0]
        ]
    )
    for part in found.values():
        part.forward = _quantizing(part)
    try:
        yield
    finally:
        for part in found.values():
            del part.forward


def _quantizing(part: FakeQuantize) -> Callable[[torch.Tensor], torch.Tensor]:
    low, high = part.activation_post_process.quant_min, part.activation_post_process.quant_max

    def forward(x: torch.Tensor) -> torch.Tensor:
        if part.is_per_channel:
            return torch.fake_quantize_per_channel_affine(
                x, part.scale, part.zero_point, part.ch_axis, low, high
            )
        return torch.fake_quantize_per_tensor_affine(x, part.scale, part.zero_point, low, high)

    return forward if part.fake_quant_enabled[0] else lambda x: x
