"""Recognise attention in many spellings; the report names what is not recognised. Runs on graph
ops, after the fixes of imports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import IRModule, relax
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.report import AttentionSite, Report

from ._map_functions import map_functions
from .canonical_attention.adjoints import Missed, is_adjoint, without_gradients
from .canonical_attention.anchors import softmaxes_of, unnormalised
from .canonical_attention.calls import is_attention, plan_call
from .canonical_attention.emit import Emitter
from .canonical_attention.graph import Graph, NearMiss
from .canonical_attention.plan import Plan, Softmax, plan
from .canonical_attention.split_functions import softmax_arguments, split_softmaxes
from .op.attention import ATTRIBUTES


@tvm.transform.module_pass(opt_level=0, name="CanonicalizeAttention")
class CanonicalizeAttention:
    """Replace attention in plain ops by one `R.sits.attention` per block.

    Starts at each softmax, reads up to the product of queries and keys and
    down to that with the values, and decides at the end. Layouts are compared as index maps: how
    queries, keys and values are transposed, split, repeated or folded does not matter. Scalar
    factors on queries, keys and scores are one `scale`; masks are causal offset and window where
    that is proved, else a bias. Equal up to rounding: factors move, half-precision softmax is
    computed in float32, and unused bindings are removed. TVM's `R.nn.attention` becomes the op,
    too; where the block is one already, repeated heads and masks of proved form are taken out.

    A softmax that leads to a product, or whose scores are a product of two activations, and that is
    no such attention is left alone: a note and the report name the condition that failed and the
    binding. So are exponentials of such scores that make no softmax.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(
                q: R.Tensor((1, 4, "s", 16), "float32"),
                k: R.Tensor((1, 2, "s", 16), "float32"),
                v: R.Tensor((1, 2, "s", 16), "float32"),
            ) -> R.Tensor((1, 4, "s", 16), "float32"):
                s = T.int64()
                with R.dataflow():
                    scaled = R.multiply(q, R.const(0.25, "float32"))
                    keys = R.repeat(k, repeats=2, axis=1)
                    values = R.repeat(v, repeats=2, axis=1)
                    kt = R.permute_dims(keys, axes=[0, 1, 3, 2])
                    scores = R.matmul(scaled, kt)
                    ones = R.ones(R.shape([s, s]), dtype="bool")
                    visible = R.tril(ones)
                    masked = R.where(visible, scores, R.const(float("-inf"), "float32"))
                    weights = R.nn.softmax(masked, axis=-1)
                    y = R.matmul(weights, values)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(
                q: R.Tensor((1, 4, "s", 16), "float32"),
                k: R.Tensor((1, 2, "s", 16), "float32"),
                v: R.Tensor((1, 2, "s", 16), "float32"),
            ) -> R.Tensor((1, 4, "s", 16), "float32"):
                with R.dataflow():
                    out = R.sits.attention(q, k, v, scale=0.25, causal=0)
                    y = out
                    R.output(y)
                return y

    Parameters
    ----------
    report : Report, optional
        Gets a row per block in `attention`: its attributes and what was proved of its masks, or
        the condition that failed.
    """

    def __init__(self, *, report: Report | None = None) -> None:
        self.report = report

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        arguments = softmax_arguments(mod)

        def visit(name: str, func: relax.Function) -> relax.Function:
            graph = Graph(func)
            split = split_softmaxes(graph, arguments)
            found = _Canonicalizer(mod, name, graph, split, self.report)
            return found.visit_expr(func) if found.plans else func

        result = map_functions(mod, visit)
        return mod if result is mod else relax.transform.DeadCodeElimination()(result)


def blocks(
    graph: Graph, softmaxes: Sequence[Softmax]
) -> Iterator[tuple[relax.Var, Callable[[], Plan]]]:
    """Where attention may be, and how to plan it: ops, and softmax between products."""
    for binding in graph.bindings:
        var = binding.var
        if is_attention(graph, var) and not graph.is_copy(var):
            yield var, partial(plan_call, graph, var)
    for softmax in softmaxes:
        var = softmax.divided.result if softmax.divided else softmax.weights
        yield var, partial(plan, graph, softmax)


@mutator
class _Canonicalizer(PyExprMutator):
    def __init__(
        self,
        mod: IRModule,
        function: str,
        graph: Graph,
        misses: Iterable[Missed],
        report: Report | None,
    ) -> None:
        super().__init__(mod)
        self.function, self.graph, self.report = function, graph, report
        self.plans: dict[relax.Var, Plan] = {}
        self.current: relax.Var | None = None
        softmaxes = softmaxes_of(graph)
        misses = [*misses, *unnormalised(graph, softmaxes)]
        for var, make in blocks(graph, softmaxes):
            try:
                found = make()
                self.plans[found.result] = found
            except NearMiss as missed:
                misses.append((var, missed))
        for block, near in without_gradients(misses) if is_adjoint(mod, function) else misses:
            self.note_near_miss(block, near)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.current = binding.var
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        found, self.current = self.plans.pop(self.current, None), None
        if found is None:
            return super().visit_call_(call)
        try:
            emitter = Emitter(self.builder_, self.lookup, self.visit_expr)
            result, name, op, proof = emitter.emit(found)
        except NearMiss as missed:
            self.note_near_miss(found.result, missed)
            return super().visit_call_(call)
        self.note_recognised(name, op, proof)
        return result

    def lookup(self, var: relax.Var) -> relax.Expr | None:
        value = self.graph.bound.get(var)
        return self.lookup_binding(var) if value is None else value

    def note_recognised(self, binding: str, op: relax.Call, proof: str) -> None:
        if self.report is not None:
            attrs = {key: _plain(op.attrs[key]) for key in ATTRIBUTES}
            attrs["bias"] = str(op.args[3].ty.dtype) if len(op.args) > 3 else None
            reason = re.sub(r"\(?T\.int64\((-?\d+)\)\)?", r"\1", proof) or "no mask"
            site = AttentionSite(self.function, binding, True, reason, attrs)
            self.report.attention.append(site)

    def note_near_miss(self, block: relax.Var, missed: NearMiss) -> None:
        binding, message = missed.binding or block.name, _words(missed.message)
        emit(
            Diagnostic.note(
                f"attention-{missed.code}",
                f"not recognised as attention: {message}",
                function=self.function,
                binding=binding,
                help=missed.help,
            )
        )
        if self.report is not None:
            reason = f"{missed.code}: {message}, at `{binding}`"
            site = AttentionSite(self.function, block.name, False, reason, {})
            self.report.attention.append(site)


def _words(text: str) -> str:
    """Without the type of numbers."""
    return re.sub(r"\(?T\.int64\((-?\d+)\)\)?", r"\1", text)


def _plain(value: Any) -> Any:
    """An attribute as a Python number or text."""
    if isinstance(value, tvm.tirx.IntImm):
        return int(value)
    return float(value) if isinstance(value, tvm.tirx.FloatImm) else value
