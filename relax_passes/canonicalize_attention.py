"""Recognise attention however it is spelled. Runs on graph ops, after the fixes of imports."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import IRModule, relax
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes._attention_anchors import softmaxes
from relax_passes._attention_emit import Emitter
from relax_passes._attention_graph import Graph, NearMiss
from relax_passes._attention_plan import Plan, plan
from relax_passes._map_functions import map_functions
from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.report import AttentionSite, Report


@tvm.transform.module_pass(opt_level=0, name="CanonicalizeAttention")
class CanonicalizeAttention:
    """Replace attention in plain ops by one `R.sits.attention` per block."""

    def __init__(self, report: Report | None = None) -> None:
        self.report = report

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        def visit(name: str, func: relax.Function) -> relax.Function:
            found = _Canonicalizer(mod, name, Graph(func), self.report)
            return found.visit_expr(func) if found.plans else func

        result = map_functions(mod, visit)
        return mod if result is mod else relax.transform.DeadCodeElimination()(result)


@mutator
class _Canonicalizer(PyExprMutator):
    def __init__(self, mod: IRModule, function: str, graph: Graph, report: Report | None) -> None:
        super().__init__(mod)
        self.function, self.graph, self.report = function, graph, report
        self.plans: dict[relax.Var, Plan] = {}
        self.current: relax.Var | None = None
        for softmax in softmaxes(graph):
            try:
                found = plan(graph, softmax)
                self.plans[found.result] = found
            except NearMiss as missed:
                self.note_near_miss(softmax.weights, missed)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.current = binding.var
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        found, self.current = self.plans.pop(self.current, None), None
        if found is None:
            return super().visit_call_(call)
        try:
            emitter = Emitter(self.builder_, self.lookup, self.visit_expr)
            result, op, proof = emitter.emit(found)
        except NearMiss as missed:
            self.note_near_miss(found.result, missed)
            return super().visit_call_(call)
        self.note_recognised(found.result, op, proof)
        return result

    def lookup(self, var: relax.Var) -> relax.Expr | None:
        value = self.graph.bound.get(var)
        return self.lookup_binding(var) if value is None else value

    def note_recognised(self, result: relax.Var, op: relax.Call, proof: str) -> None:
        if self.report is not None:
            attrs = {key: _plain(op.attrs[key]) for key in _ATTRIBUTES}
            attrs["bias"] = str(op.args[3].ty.dtype) if len(op.args) > 3 else None
            site = AttentionSite(self.function, result.name, True, proof, attrs)
            self.report.attention.append(site)

    def note_near_miss(self, block: relax.Var, missed: NearMiss) -> None:
        binding = missed.binding or block.name
        emit(
            Diagnostic.note(
                f"attention-{missed.code}",
                f"not recognised as attention: {missed.message}",
                function=self.function,
                binding=binding,
            )
        )
        if self.report is not None:
            reason = f"{missed.code}: {missed.message}, at `{binding}`"
            site = AttentionSite(self.function, block.name, False, reason, {})
            self.report.attention.append(site)


_ATTRIBUTES = ("scale", "causal", "window", "softcap", "empty_row", "softmax_dtype")


def _plain(value: Any) -> Any:
    """An attribute as a Python number or text."""
    if isinstance(value, tvm.tirx.IntImm):
        return int(value)
    return float(value) if isinstance(value, tvm.tirx.FloatImm) else value
