"""`check_attention_redundancy`: what the attentions of one function compute twice or for little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import IRModule, relax

from relax_passes.canonicalize_attention import CanonicalizeAttention
from relax_passes.head_rules.attention_projections import (
    AttentionWeights,
    FunctionUses,
    find_attention_weights,
)
from relax_passes.head_rules.facts import HeadWeights
from relax_passes.head_rules.low_rank_rewrite import projections_of
from relax_passes.head_rules.weight_edits import WeightEdits, as_numpy
from relax_passes.packed_weights.weight_sites import weights_of
from relax_passes.prune_redundant_attention import PruneRedundantAttention

from ..diagnostics import Diagnostic, SitsError, collect, raise_errors
from ..module_checks import check_functions
from ..params import as_arrays, bind_names, mismatch, weight_names
from ..pipeline import run_on_host
from .capture import Captured, captured, capturing
from .measures import (
    attention_maps,
    contributions,
    dropped_mass,
    kept_keys,
    most_similar,
    norm_quantiles,
    projection_rank,
    weight_gram,
)
from .result import AttentionRedundancy
from .rows import AttentionRow, Measured, Similarity

KV_BITS = {"float16": 16.0, "int8/32": 8.5, "int4/32": 4.5}


def check_attention_redundancy(
    mod: IRModule,
    params: Mapping[str, Any],
    inputs: Sequence[Any] | None = None,
    *,
    func: str = "main",
) -> AttentionRedundancy:
    """Measure what an approximate rewrite of attention could win. Nothing is rewritten.

    Parameters
    ----------
    mod : IRModule
        Attention may be spelled in any way that `CanonicalizeAttention` recognises.
    params : mapping of str to tensor
        Values of the arguments after ``num_input``, by name, as `build` takes them.
    inputs : list of tensor, optional
        Sample inputs, the arguments before the parameters, in their dtypes. With them the function
        is compiled for this CPU and run once, and maps, contributions, norms and masses are
        measured; without them ranks, similarity of weights and bytes alone.
    func : str

    Returns
    -------
    AttentionRedundancy
        `rows`, one per attention; prints as tables; `to_json`, `plot`.

    Raises
    ------
    SitsError
        If there is no such function, it has no attention, or parameters or inputs are not those
        that it takes.
    """
    check_functions(mod, [func])
    arrays = as_arrays(params)
    with collect():
        plain = tvm.transform.Sequential(
            [
                CanonicalizeAttention(),
                PruneRedundantAttention(["views"]),
                relax.transform.ToNonDataflow(),
            ]
        )(bind_names(mod, arrays))
    function = plain[func]
    given = None if inputs is None else _checked_inputs(func, function, inputs)
    found = dict(find_attention_weights(func, function, weights_of(function)))
    if not found:
        message = f"{func} has no attention"
        help_ = "sits_tvm.check reports what looks like attention and is not recognised"
        raise SitsError([Diagnostic.error("no-attention", message, function=func, help=help_)])
    sites = [site for site in found.values() if isinstance(site, AttentionWeights)]
    values = {} if given is None else _values(plain, func, sites, arrays, given)
    bound, edits = FunctionUses.of(function).bound, WeightEdits(arrays)
    rows = [
        _row(func, variable, bound[variable], site, edits, values.get(variable))
        for variable, site in found.items()
    ]
    return AttentionRedundancy(func, rows)


def _checked_inputs(name: str, function: relax.Function, inputs: Any) -> list[np.ndarray]:
    """NumPy arrays of the arguments before the parameters."""
    arguments = function.params[: len(function.params) - len(weight_names(function))]
    taken = f"{name} takes {len(arguments)}: {', '.join(a.name for a in arguments)}"
    if not isinstance(inputs, list | tuple):
        message = f"inputs is a {type(inputs).__name__}, not a list of tensors; {taken}"
        help_ = "write inputs=[x]"
        raise SitsError([Diagnostic.error("inputs", message, function=name, help=help_)])
    if len(inputs) != len(arguments):
        message = f"{len(inputs)} inputs are given; {taken}"
        help_ = "give those before the parameters, in order"
        raise SitsError([Diagnostic.error("inputs", message, function=name, help=help_)])
    arrays = [as_arrays({a.name: x})[a.name] for a, x in zip(arguments, inputs, strict=True)]
    pairs = zip(arguments, arrays, strict=True)
    raise_errors([fault for a, x in pairs for fault in mismatch(name, a, x, "input")])
    return [as_numpy(x) for x in arrays]


def _values(
    mod: IRModule,
    name: str,
    sites: Sequence[AttentionWeights],
    params: Mapping[str, Any],
    inputs: Sequence[np.ndarray],
) -> dict[relax.Var, Captured]:
    instrumented, wanted = capturing(mod, name, sites)
    weights = [as_numpy(params[weight]) for weight in weight_names(mod[name])]
    arrays = run_on_host(instrumented)(name, [*inputs, *weights])
    found = captured(sites, wanted, arrays)
    return {site.variable: one for site, one in zip(sites, found, strict=True)}


def _row(
    function: str,
    variable: relax.Var,
    call: relax.Call,
    site: AttentionWeights | str,
    edits: WeightEdits,
    values: Captured | None,
) -> AttentionRow:
    heads, dim = (int(call.args[0].ty.shape[i]) for i in (1, 3))
    groups, value_dim = (int(call.args[2].ty.shape[i]) for i in (1, 3))
    channels = groups * (dim + value_dim)
    kv_bytes = {name: channels * bits / 8 for name, bits in KV_BITS.items()}
    row = AttentionRow(function, variable.name, heads, groups, dim, value_dim, kv_bytes)
    if isinstance(site, str):
        return AttentionRow(**{**vars(row), "reason": site})
    weights = HeadWeights.of(site, edits)
    return AttentionRow(
        **{
            **vars(row),
            "ranks": [projection_rank(p.name, p.matrix(edits)) for p in projections_of(site)],
            "weight_similarity": _weight_similarity(weights),
            "measured": None if values is None else _measured(site, weights, values),
        }
    )


def _weight_similarity(weights: HeadWeights) -> Similarity:
    ratio = len(weights.q) // len(weights.v)
    values = [np.hstack([leaf.astype("float64") for leaf in v]) for v in weights.v]
    outputs = weights.o.astype("float64")
    return most_similar(weight_gram(outputs, np.repeat(np.stack(values), ratio, axis=0)))


def _measured(site: AttentionWeights, weights: HeadWeights, values: Captured) -> Measured:
    maps, visible = attention_maps(values.q, values.k, values.bias, site.call.attrs)
    added = contributions(maps, values.v, weights.o)
    flat = added.reshape(len(added), -1)
    rows = np.moveaxis(maps, 1, 0).reshape(len(added), -1)
    residual = values.residual
    after = values.output if residual is None else values.output.astype("float64") + residual
    return Measured(
        map_similarity=most_similar(rows @ rows.T),
        contribution_similarity=most_similar(flat @ flat.T),
        importance=tuple(np.linalg.norm(flat, axis=1) / max(np.linalg.norm(after), 1e-300)),
        norm_ratio={} if residual is None else norm_quantiles(values.output, residual),
        dropped=dropped_mass(maps, visible),
        kept_keys=kept_keys(maps, visible),
        tokens=added.shape[1],
    )
