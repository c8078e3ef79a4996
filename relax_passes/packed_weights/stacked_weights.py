"""Which products of one input become one, with their weights stacked along the output channels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import tvm_ffi
from tvm import relax
from tvm.ir import GenericConst, GlobalVar, IRModule

from sits_tvm.report import Report, StackedWeights
from tir_schedules.int4_format.packed_order import channels_together

from .weight_sites import MATMUL, WeightSite

Sites = Mapping[GlobalVar, Sequence[WeightSite]]
Reasons = dict[relax.Var, str]
"""By binding, why a product stays alone."""


def stack_weights(
    mod: IRModule, chosen: Sites, order: str, report: Report
) -> dict[GlobalVar, list[list[WeightSite]]]:
    """Groups of products of `chosen`, by function.

    `report.stacked` gets each group, and each product of an input with others that is in none. A
    weight is stacked in the same way by all functions that read it.
    """
    found = {gvar: _Inputs(mod[gvar], sites, order) for gvar, sites in chosen.items()}
    ways: dict[str, set[tuple[bool, tuple[str, ...]]]] = defaultdict(set)
    for gvar, sites in chosen.items():
        names = {s.binding: _names(group) for group in found[gvar].groups for s in group}
        for site in sites:
            ways[site.name].add((site.transposed, names.get(site.binding, (site.name,))))
    stacked = {}
    for gvar, inputs in found.items():
        for group in inputs.groups:
            if any(
                len(ways[site.name]) > 1 for site in group if isinstance(site.source, relax.Var)
            ):
                reason = "another function reads one of these weights in another way"
                inputs.reasons |= {site.binding: reason for site in group}
        stacked[gvar] = [g for g in inputs.groups if g[0].binding not in inputs.reasons]
        rows = [(group[0], _names(group), "") for group in stacked[gvar]]
        rows += [
            (s, (s.name,), why) for s in chosen[gvar] if (why := inputs.reasons.get(s.binding))
        ]
        report.stacked += [
            StackedWeights(gvar.name_hint, site.binding.name, names, why)
            for site, names, why in rows
        ]
    return stacked


def _names(group: Sequence[WeightSite]) -> tuple[str, ...]:
    return tuple(site.name for site in group)


class _Inputs:
    """The products of each input of one function: groups to stack, and reasons of the others."""

    def __init__(self, func: relax.Function, sites: Sequence[WeightSite], order: str) -> None:
        self.reasons: Reasons = {}
        self.groups: list[list[WeightSite]] = []
        self.tile = channels_together(order)
        self.readers = Counter(site.source for site in sites)
        self.meetings = _meetings(func, {site.binding for site in sites})
        by_binding = {site.binding: site for site in sites if site.kind == "matmul"}
        for block in _blocks(func.body):
            inputs: dict[relax.Expr, list[WeightSite]] = defaultdict(list)
            for binding in block.bindings:
                if binding.var in by_binding:
                    site = by_binding[binding.var]
                    inputs[site.call.args[0]].append(site)
            for products in inputs.values():
                if len(products) > 1 and isinstance(block, relax.DataflowBlock):
                    self._group(products)
                elif len(products) > 1:
                    reason = "its block is no dataflow block, in which kernels are fused"
                    self.reasons |= {site.binding: reason for site in products}

    def _group(self, products: Sequence[WeightSite]) -> None:
        alike: dict[object, list[WeightSite]] = defaultdict(list)
        for site in products:
            reason = self._reason(site, products)
            if reason is None:
                alike[_form(site)].append(site)
            else:
                self.reasons[site.binding] = reason
        for group in alike.values():
            if len(group) > 1:
                self.groups.append(group)
            else:
                reason = "no other weight of its input is of its dtype, orientation and kind"
                self.reasons.setdefault(group[0].binding, reason)

    def _reason(self, site: WeightSite, products: Sequence[WeightSite]) -> str | None:
        if self.readers[site.source] > 1:
            return "its weight is read by other products, too"
        if site.shape[0] % self.tile:
            return f"its {site.shape[0]} output channels are no multiple of {self.tile}"
        others = {other.binding for other in products} - {site.binding}
        for meeting, reached in self.meetings.items():
            if site.binding in reached and reached & others:
                return f"its result meets that of another elementwise, in {meeting.name}"
        return None


def _form(site: WeightSite) -> object:
    """What the products of a group have in common, apart from their input."""
    dtypes = str(site.source.ty.dtype), str(site.call.ty.dtype)
    return isinstance(site.source, GenericConst), site.transposed, dtypes


def _meetings(func: relax.Function, products: set[relax.Var]) -> dict[relax.Var, set[relax.Var]]:
    """Where results of several products meet, through ops that keep their shape: gate and up.

    The last one's kernel then computes what follows; a stacked product could not.
    """
    reaching: dict[relax.Var, set[relax.Var]] = {product: {product} for product in products}
    meetings: dict[relax.Var, set[relax.Var]] = {}
    for block in _blocks(func.body):
        for binding in block.bindings:
            value = binding.value
            if not isinstance(value, relax.Call) or value.op == MATMUL:
                continue
            kept = [a for a in value.args if a in reaching and _same_shape(a, value)]
            reached = set().union(*(reaching[arg] for arg in kept))
            if reached:
                reaching[binding.var] = reached
            if len(kept) > 1 and len(reached) > 1:
                meetings[binding.var] = reached
    return meetings


def _same_shape(a: relax.Expr, b: relax.Expr) -> bool:
    tensors = isinstance(a.ty, relax.TensorType) and isinstance(b.ty, relax.TensorType)
    return tensors and tvm_ffi.structural_equal(a.ty.shape, b.ty.shape)


def _blocks(body: relax.SeqExpr) -> Iterator[relax.BindingBlock]:
    """All binding blocks in order, those of branches too."""
    for block in body.blocks:
        yield block
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from _blocks(binding.value.true_branch)
                yield from _blocks(binding.value.false_branch)
