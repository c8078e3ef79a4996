"""Remove what the weights of attention hold twice, or for nothing: heads and ranks.

Works on modules with `relax.sits.attention` and the values of their weights, before these are
quantized. All rewrites are exact up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from tvm import relax
from tvm.ir import IRModule
from tvm.runtime import Tensor

from sits_tvm.config import HEAD_RULES
from sits_tvm.report import AttentionRewrite, Report

from .head_rules.attention_projections import AttentionWeights, FunctionUses, find_attention_weights
from .head_rules.certificate import heads_reason
from .head_rules.facts import HeadWeights, find_heads, folded_constant, output_rows, storing_fault
from .head_rules.low_rank import Screening
from .head_rules.low_rank_rewrite import factor_projections
from .head_rules.plan import is_unchanged, plan_heads
from .head_rules.private_weights import reason_against
from .head_rules.rewrite import HeadRewriter, SitePlan
from .head_rules.weight_edits import WeightEdits
from .index_analysis.row_visibility import no_row_is_empty
from .packed_weights.weight_sites import argument_names, weights_of

Params = Mapping[str, Tensor | np.ndarray]


def prune_redundant_heads(
    mod: IRModule,
    params: Params,
    *,
    rules: Collection[str] = HEAD_RULES,
    report: Report | None = None,
) -> tuple[IRModule, dict[str, Tensor | np.ndarray]]:
    """Remove the heads and ranks of attention that the weights prove to be redundant.

    Parameters
    ----------
    mod : IRModule
        With `R.sits.attention`. It is not changed.
    params : mapping of str to tensor
        Values of the arguments after ``num_input``, by name. Constants are looked at, too.
    rules : names of the rewrites to do; default all

        ``zero-heads``: heads that the output projection multiplies by zero.
        ``constant-values``: heads whose values are a bias alone: softmax rows sum to 1, so each
        result is that bias, and W_o b_v is added to the output (where no row can be empty).
        ``equal-heads``: heads of equal attention map and values, up to powers of two, signs and
        the order of dimensions: the columns of W_o are added.
        ``shared-maps``: heads of equal map only: one map, the values side by side.
        ``low-rank``: a projection W (m, n) of rank r < m·n / (m + n) becomes two factors, where
        ‖W - A·B‖₂ ≤ 4·u·‖W‖₂ as stored, with u the unit roundoff of its dtype. That a matrix has
        full rank takes a proof of its own, a second for 4096×4096; after 2·10¹¹ multiply-adds only
        ranks below 128 are ruled out, and the report says so.
    report : Report, optional
        Gets a row in `attention_rewrites` per attention: what was proved, or why nothing changed.

    Returns
    -------
    mod : IRModule
    params : dict
        Without the weights that no function takes any more, with those made here.

    Raises
    ------
    ValueError
        For a rule that does not exist.
    """
    unknown = sorted(set(rules) - set(HEAD_RULES))
    if unknown:
        raise ValueError(f"rules={unknown}: there are {', '.join(HEAD_RULES)}")
    chosen, screening = frozenset(rules), Screening()
    rows = report.attention_rewrites if report is not None else []
    out, values = mod, dict(params)
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function):
            new, made = _prune(gvar.name_hint, func, mod, values, chosen, rows, screening)
            out, values = _updated(out, gvar, new, func), {**values, **made}
    if out.same_as(mod):
        return mod, values
    taken, before = argument_names(out), argument_names(mod)
    unused = before | (values.keys() - params.keys())
    return out, {n: v for n, v in values.items() if n in taken or n not in unused}


def _prune(
    name: str,
    func: relax.Function,
    mod: IRModule,
    params: Params,
    rules: frozenset[str],
    rows: list[AttentionRewrite],
    screening: Screening,
) -> tuple[relax.Function, Params]:
    made: dict[str, np.ndarray] = {}
    if rules - {"low-rank"}:
        func, made = _prune_heads(name, func, mod, params, rules, rows)
    if "low-rank" in rules:
        both = {**params, **made}
        func, factors = factor_projections(name, func, mod, both, rows, screening)
        made = made | factors
    return func, made


def _prune_heads(
    name: str,
    func: relax.Function,
    mod: IRModule,
    params: Params,
    rules: frozenset[str],
    rows: list[AttentionRewrite],
) -> tuple[relax.Function, dict[str, np.ndarray]]:
    uses, edits, plans = FunctionUses.of(func), WeightEdits(params), []
    weights = {w for w in weights_of(func) if w.name in params}
    for variable, site in find_attention_weights(name, func, weights):
        reason = site if isinstance(site, str) else reason_against(site, uses, mod)
        changed = False
        if isinstance(site, AttentionWeights) and reason is None:
            plan, reason = _plan(site, edits, rules)
            changed = plan is not None
            plans += [plan] if plan is not None else []
        rows.append(AttentionRewrite(name, variable.name, "heads", changed, str(reason)))
    if not plans:
        return func, {}
    return edits.finish(func, HeadRewriter(mod, uses.bound, plans, edits))


def _plan(
    site: AttentionWeights, edits: WeightEdits, rules: frozenset[str]
) -> tuple[SitePlan | None, str]:
    weights = HeadWeights.of(site, edits)
    found = find_heads(site, weights, rules, no_row_is_empty(site.call))
    parts = plan_heads(found.facts, "shared-maps" in rules)
    if is_unchanged(parts, found.facts):
        return None, heads_reason(site, weights, found, None)
    outputs = [output_rows(part, weights, found.forms) for part in parts]
    constant = folded_constant(found, parts, weights)
    fault = storing_fault([*outputs, *([] if constant is None else [constant])], weights.o.dtype)
    if fault:
        return None, f"nothing pruned: {fault}"
    plan = SitePlan(site, parts, outputs, constant)
    return plan, heads_reason(site, weights, found, plan)


def _updated(
    mod: IRModule, gvar: relax.GlobalVar, new: relax.Function, old: relax.Function
) -> IRModule:
    if new.same_as(old):
        return mod
    out = mod.clone()
    out[gvar.name_hint] = new
    return relax.transform.Normalize()(out)
