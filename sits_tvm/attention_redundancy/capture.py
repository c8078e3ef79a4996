"""Values of a function at its attentions: the same function with more results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import IRModule, relax
from tvm.ir import Op

from relax_passes.head_rules.attention_projections import AttentionWeights, FunctionUses

_ADD = Op.get("relax.add")
_SAME = [Op.get(f"relax.{name}") for name in ("reshape", "astype")]
_PERMUTE = Op.get("relax.permute_dims")


@dataclass(frozen=True)
class Captured:
    """Arrays of one attention: its arguments, what was added to the residual, and that."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bias: np.ndarray | None
    output: np.ndarray
    residual: np.ndarray | None


def capturing(
    mod: IRModule, name: str, sites: Sequence[AttentionWeights]
) -> tuple[IRModule, list[list[relax.Expr]]]:
    """The function `name` of a module without dataflow blocks, returning what `captured` reads."""
    func = mod[name]
    uses = FunctionUses.of(func)
    wanted = [[*site.call.args, *_residual_of(site.product, uses)] for site in sites]
    result = relax.BlockBuilder().normalize(relax.Tuple([x for row in wanted for x in row]))
    attrs = {k: v for k, v in (func.attrs or {}).items() if k != "num_input"}
    body = relax.SeqExpr(func.body.blocks, result)
    made = relax.Function(func.params, body, result.ty, func.is_pure).with_attrs(attrs)
    out = IRModule({mod.get_global_var(name): func}, attrs=mod.attrs)
    out.update_func(out.get_global_var(name), made)
    return relax.transform.ConvertToDataflow()(relax.transform.Normalize()(out)), wanted


def _residual_of(product: relax.Var, uses: FunctionUses) -> list[relax.Var]:
    """What is added to the residual stream, and the stream before, which may be missing."""
    at = product
    while True:
        readers = uses.readers.get(at, [])
        reader = readers[0] if len(readers) == 1 else None
        value = uses.bound.get(reader) if reader is not None else None
        if not isinstance(value, relax.Call) or not _keeps_channels(value):
            return [at]
        others = [arg for arg in value.args if not arg.same_as(at)]
        if value.op == _ADD and len(others) == 1 and others[0].ty.ndim == at.ty.ndim > 1:
            return [at, others[0]]
        at = reader


def _keeps_channels(call: relax.Call) -> bool:
    """Whether the last axis stays the last; of an addition, too."""
    if call.op == _PERMUTE:
        axes = call.attrs["axes"]
        return axes is not None and int(axes[-1]) % len(axes) == len(axes) - 1
    return call.op in (_ADD, *_SAME)


def captured(
    sites: Sequence[AttentionWeights], wanted: Sequence[list], arrays: Sequence[np.ndarray]
) -> list[Captured]:
    """The results of the function of `capturing`, by site."""
    found, rest = [], list(arrays)
    for site, row in zip(sites, wanted, strict=True):
        mine, rest = rest[: len(row)], rest[len(row) :]
        count = len(site.call.args)
        q, k, v, *bias = mine[:count]
        output, *residual = mine[count:]
        found.append(
            Captured(q, k, v, bias[0] if bias else None, output, residual[0] if residual else None)
        )
    return found
