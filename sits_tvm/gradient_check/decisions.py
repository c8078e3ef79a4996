"""What no vector decides: a bound or a branch that is the same at every element of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..diagnostics import Diagnostic
from ._torch_values import to_torch
from .twin import Site, Twin
from .vectors import Vector

_POSITIVE = {"abs", "sign", "nn.relu", "nn.leakyrelu"}
_COMPARE = {
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
}
_HELP = "give inputs= and params= on both sides, or compare this branch yourself"


def undecided(twin: Twin, vectors: Sequence[Vector]) -> list[Diagnostic]:
    """A warning for each decision in the float64 reference that is always taken one way.

    The gradient on the other side is not checked: an adjoint that ignores ``R.clip(x, -50, 50)``
    is right wherever x stays inside. Clips, maximum and minimum, relu, abs, sign and comparisons of
    floats are decisions; those of quantize ops are in `GradientRow.clipped`.
    """
    import torch

    seen: dict[tuple[int, str], set[bool]] = {}

    def watch(index: int, at: Sequence[Any]) -> None:
        for what, mask in _decisions(twin.sites[index], at):
            outcomes = seen.setdefault((index, what), set())
            outcomes |= {bool(value) for value in mask.unique()}

    params = [param.name for param in twin.function.params]
    with torch.no_grad():
        for vector in vectors:
            twin.run([to_torch(vector.args[name]) for name in params], watch=watch)
    return [
        _warning(twin, twin.sites[index], what, outcomes.pop(), len(vectors))
        for (index, what), outcomes in seen.items()
        if len(outcomes) == 1
    ]


def _decisions(site: Site, at: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """What an op decides by element: words, and where it is so."""
    import torch

    name = _name(site)
    if name == "clip":
        for word, bound, compare in (("below", at[1], torch.lt), ("above", at[2], torch.gt)):
            if np.isfinite(float(bound)):
                yield f"{word} {float(bound):g}", compare(at[0], bound)
    elif name in ("maximum", "minimum"):
        yield "larger in the first argument", torch.gt(*map(torch.as_tensor, at[:2]))
    elif name in _POSITIVE:
        yield "positive", at[0] > 0
    elif name in _COMPARE:
        yield "true", getattr(torch, _COMPARE[name])(*map(torch.as_tensor, at[:2]))


def _warning(twin: Twin, site: Site, what: str, always: bool, vectors: int) -> Diagnostic:
    where = "every element" if always else "no element"
    message = (
        f"R.{_name(site)} decides alike everywhere: {where} is {what} in the {vectors} vectors "
        "compared, so the gradient on the other side is not checked"
    )
    return Diagnostic.warning(
        "gate-undecided",
        message,
        function=twin.name,
        binding=site.binding.var.name,
        ir=str(site.binding),
        help=_HELP,
    )


def _name(site: Site) -> str:
    return str(site.call.op.name).removeprefix("relax.")
