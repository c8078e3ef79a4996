"""Attention of Hugging Face decoders as one op per layer: `relax.sits.attention`.

transformers calls whatever function is registered under the name in the model's config, with q, k
(after RoPE, before heads are repeated) and v. A first run, outside of any tracing, reads which keys
each layer's mask shows; in the second, traced run each layer becomes one opaque torch op that says
so in its attributes, and no mask is built at all. Imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from tvm import relax

from relax_passes.op.attention import attention

# Keywords that models hand to every attention function and that change nothing in it.
_WITHOUT_MEANING = {
    "cache_position",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


class NotExpressible(Exception):
    """This model's attention is not `relax.sits.attention`; the message says what it has."""


@dataclass(frozen=True)
class Mask:
    """Query i sees key j when (not causal or j ≤ i) and (window = 0 or i - window < j)."""

    causal: bool
    window: int


@dataclass(frozen=True)
class Site:
    """One attention call: what its op says."""

    scale: float
    mask: Mask
    softcap: float


@dataclass
class Sites:
    """The attention calls of one model, by the module that makes them."""

    by_module: dict[nn.Module, Site] = field(default_factory=dict)

    def add(self, module: nn.Module, site: Site) -> None:
        if self.by_module.setdefault(module, site) != site:
            raise NotExpressible(f"{type(module).__name__} attends in two ways in one pass")


_SITES: ContextVar[Sites] = ContextVar("attention sites of the model at hand")


@torch.library.custom_op("sits::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, softcap: float
) -> Tensor:
    """(B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv) → (B, H, Sq, Dv), softmax in float32."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = scores.masked_fill(~_visible(Mask(causal, window), i, j), -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


@_attention.register_fake
def _(q, k, v, scale, causal, window, softcap):
    return q.new_empty((*q.shape[:3], v.shape[3]))


def convert(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """`torch.ops.sits.attention` in the exported graph as `relax.sits.attention`."""
    q, k, v = (importer.env[arg] for arg in node.args[:3])
    scale, causal, window, softcap = node.args[3:]
    call = attention(
        q, k, v, scale=scale, causal=0 if causal else None, window=window, softcap=softcap
    )
    return importer.block_builder.emit(call)


@contextmanager
def sites_of(run: Callable[[], Any], model: PreTrainedModel) -> Iterator[Sites]:
    """Run the model once to find its attention sites; inside the block they are the opaque op.

    Raises
    ------
    NotExpressible
        If a layer's mask or an argument of its attention has no place in the op.
    """
    sites = Sites()
    token = _SITES.set(sites)
    try:
        with _implementation(model, "sits-read"):
            _read_sites(run)
        with _implementation(model, "sits"):
            yield sites
    finally:
        _SITES.reset(token)


def _read_sites(run: Callable[[], Any]) -> None:
    try:
        run()
    except NotExpressible:
        raise
    except Exception as error:  # code of the model, which meets a Mask where it knows tensors
        raise NotExpressible(f"it works on masks by itself ({error})") from error


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _configs(model: PreTrainedModel) -> list[Any]:
    found = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    for config in found:  # grows while it is walked
        found += [c for key in config.sub_configs if (c := getattr(config, key, None)) is not None]
    return list({id(config): config for config in found}.values())


def _read(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Note the site. The mask says what the window is; `sliding_window` repeats it."""
    unknown = [n for n, x in others.items() if x is not None and n not in _WITHOUT_MEANING]
    if unknown:
        raise NotExpressible(f"{type(module).__name__} passes {', '.join(sorted(unknown))}")
    if not isinstance(mask, Mask):
        raise NotExpressible(f"{type(module).__name__} passes a mask of its own, {type(mask)}")
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    _SITES.get().add(module, Site(scale, mask, float(softcap or 0.0)))
    return _op(module, q, k, v)


def _op(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
    site = _SITES.get().by_module[module]
    mask = site.mask
    out = torch.ops.sits.attention(q, k, v, site.scale, mask.causal, mask.window, site.softcap)
    return out.transpose(1, 2).contiguous(), None


def _read_mask(*_: Any, mask_function: Callable, attention_mask: Any = None, **__: Any) -> Mask:
    if attention_mask is not None:
        raise NotExpressible("the model makes a padding mask by itself")
    far = 1 << 24
    causal = not _shows(mask_function, 0, 1)
    near, beyond = 0, far + 1  # distances to the oldest visible and the newest hidden key
    while beyond - near > 1:
        middle = (near + beyond) // 2
        near, beyond = (
            (middle, beyond) if _shows(mask_function, far, far - middle) else (near, middle)
        )
    mask = Mask(causal, 0 if near == far else near + 1)
    _check(mask, mask_function, far)
    return mask


def _check(mask: Mask, mask_function: Callable, far: int) -> None:
    """`mask_function` is `mask` around every place where they could differ."""
    places = {0, mask.window, 2 * mask.window, far}
    i = torch.tensor(sorted({max(p + d, 0) for p in places for d in range(-4, 5)}))[:, None]
    steps = torch.tensor([d + s for d in (-mask.window, -1, 0, mask.window) for s in range(-4, 5)])
    j = (i + steps).clamp(min=0)
    if not torch.equal(_call(mask_function, i, j), _visible(mask, i, j)):
        name = getattr(mask_function, "__qualname__", mask_function)
        raise NotExpressible(f"its mask is neither causal nor a sliding window ({name})")


def _visible(mask: Mask, i: Tensor, j: Tensor) -> Tensor:
    seen = (j <= i) if mask.causal else torch.ones_like(j <= i)
    return seen & (i - mask.window < j) if mask.window else seen


def _shows(mask_function: Callable, i: int, j: int) -> bool:
    return bool(_call(mask_function, torch.tensor(i), torch.tensor(j)))


def _call(mask_function: Callable, i: Tensor, j: Tensor) -> Tensor:
    zero = torch.tensor(0)
    return torch.as_tensor(mask_function(zero, zero, i, j)).expand(
        torch.broadcast_shapes(i.shape, j.shape)
    )


AttentionInterface.register("sits-read", _read)
AttentionMaskInterface.register("sits-read", _read_mask)
AttentionInterface.register("sits", _op)
