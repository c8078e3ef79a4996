"""A way to write attention in PyTorch, what `R.sits.attention` must say of it, and a near miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

INF = float("inf")
NOTHING = "nothing"  # a reason: no softmax to report on
ROOT = 8**0.5  # √D of most spellings: B = 2, H = 4, D = 8


@dataclass(frozen=True)
class Says:
    """The attributes of the op, derived by hand.

    empty_row None: no row is empty, every word is right. bias None: no bias; else the dtypes that
    are right, "bool", "float" or "bool|float". scores_dtype: this or float32. heads (H, G); None:
    several are right.
    """

    scale: float
    causal: int | str | None = None
    window: int = 0
    softcap: float = 0.0
    empty_row: str | None = None
    bias: str | None = None
    scores_dtype: str = "float32"
    heads: tuple[int, int] | None = (4, 4)


@dataclass(frozen=True)
class Twin:
    """The spelling with `changes` to its knobs: refused with `reason`, or the attention `says`.

    A reason is the start of the one in the report. Where both are given, either is right.
    """

    changes: dict[str, Any]
    reason: str = ""
    says: Says | None = None
    operands: Callable[..., tuple] | None = None


@dataclass(frozen=True)
class Spelling:
    """`forward(*inputs)` is `result(attention(*operands(*inputs)))`, or its first output is.

    `inputs(s, t)` draws them for s queries and t keys; a dimension that changes with s or t can be
    dynamic. `lengths` are those of the static export.
    """

    name: str
    forward: Callable[..., Any]
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    says: Says
    twin: Twin
    operands: Callable[..., tuple] = lambda *inputs: inputs
    result: Callable[[Tensor], Tensor] = lambda out: out
    lengths: tuple[int, int] = (6, 7)
    dynamic: bool = True
    knobs: dict[str, Any] = field(default_factory=dict)

    def module(self) -> nn.Module:
        return _Module(self.forward, self.knobs)

    def twin_module(self) -> nn.Module:
        return _Module(self.forward, {**self.knobs, **self.twin.changes})

    def dynamic_shapes(self) -> tuple:
        """For torch.export: dimensions named s and t after what they change with."""
        dims = {(6, 9): torch.export.Dim("s", min=2, max=12)}
        dims[7, 11] = torch.export.Dim("t", min=2, max=12)
        pairs = zip(self.inputs(6, 7), self.inputs(9, 11), strict=True)
        return (tuple(_changed(a.shape, b.shape, dims) for a, b in pairs),)


class _Module(nn.Module):
    def __init__(self, forward: Callable[..., Any], knobs: dict[str, Any]) -> None:
        super().__init__()
        self.spell, self.knobs = forward, knobs

    def forward(self, *inputs: Tensor) -> Any:
        return self.spell(*inputs, **self.knobs)


def _changed(a: torch.Size, b: torch.Size, dims: dict) -> dict:
    sizes = enumerate(zip(a, b, strict=True))
    return {axis: dims[pair] for axis, pair in sizes if pair[0] != pair[1]}


def definition(says: Says, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the op means, in float64: query head h reads head h // (H / G), p(i) = i + offset."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = says.scale * (q @ k.mT)
    if says.softcap:
        scores = says.softcap * torch.tanh(scores / says.softcap)
    visible = band(says, q.shape[2], k.shape[2])
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias
    elif bias is not None:
        scores = scores + bias.double()
        visible = visible & (bias != -INF)
    scores = scores.masked_fill(~visible, -INF)
    value = {"zero": 0.0, "uniform": 1 / k.shape[2]}.get(str(says.empty_row), float("nan"))
    is_empty = (scores == -INF).all(-1, keepdim=True)
    return torch.where(is_empty, value, torch.softmax(scores, -1)) @ v


def band(says: Says, num_queries: int, num_keys: int) -> Tensor:
    """(Sq, Sk) bool: what `causal` and `window` leave visible."""
    first = offset(says.causal, num_queries, num_keys) or 0
    position, key = torch.arange(num_queries)[:, None] + first, torch.arange(num_keys)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if says.causal is not None:
        visible &= key <= position
    return visible & (key > position - says.window) if says.window else visible


def offset(causal: int | str | None, num_queries: int, num_keys: int) -> int | None:
    """`causal` as a number."""
    return num_keys - num_queries if causal == "bottom_right" else causal  # type: ignore[return-value]


# Inputs


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def bhsd(s: int, t: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q (B, H, s, D), k and v (B, H, t, D)."""
    return tuple(normal(2, 4, n, 8, dtype=dtype) for n in (s, t, t))


def bshd(s: int, t: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q (B, s, H, D), k and v (B, t, H, D)."""
    return tuple(normal(2, n, 4, 8, dtype=dtype) for n in (s, t, t))


def grouped(s: int, t: int) -> tuple[Tensor, ...]:
    """q with 4 heads, k and v with 2."""
    return normal(2, 4, s, 8), normal(2, 2, t, 8), normal(2, 2, t, 8)


def square(draw: Callable[..., tuple]) -> Callable[[int, int], tuple]:
    """As many keys as queries."""
    return lambda s, _: draw(s, s)


def visible(*shape: int, empty: bool = True) -> Tensor:
    """Bool, three of four True; the last slice of the first axis all False where `empty`."""
    mask = torch.rand(shape) < 0.75
    mask[..., 0] = True
    mask[-1] &= not empty
    return mask


def additive(*shape: int, fill: float = -INF, empty: bool = True) -> Tensor:
    """0 where `visible`, else `fill`."""
    return torch.zeros(shape).masked_fill(~visible(*shape, empty=empty), fill)


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The first three from (B, S, H, D) to (B, H, S, D)."""
    return tuple(x.transpose(1, 2) for x in tensors[:3]) + tensors[3:]
