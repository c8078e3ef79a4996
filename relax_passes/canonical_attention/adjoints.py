"""Softmaxes of a backward function: gradients read their weights, so that none is attention."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import IRModule, relax

from .._adjoint import SUFFIX
from .graph import NearMiss

Missed = tuple[relax.Var, NearMiss]


def is_adjoint(mod: IRModule, name: str) -> bool:
    """Whether `name` is the adjoint of a function of `mod`."""
    names = {gv.name_hint for gv in mod.get_global_vars()}
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in names


def without_gradients(misses: Sequence[Missed]) -> list[Missed]:
    """The near misses of an adjoint, with one for all softmaxes that gradients read."""
    read = [missed for missed in misses if missed[1].code == "weights-used-elsewhere"]
    rest = [missed for missed in misses if missed not in read]
    if not read:
        return rest
    message = (
        f"gradients read the weights of {len(read)} softmaxes, the first of them here; attention "
        "is recognised before `differentiate`, which keeps it one op in the forward part"
    )
    first = read[0][0]
    return [(first, NearMiss("weights-of-gradients", message, first)), *rest]
