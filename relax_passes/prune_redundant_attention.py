"""Remove what attention computes twice or for nothing. Runs after CanonicalizeAttention.

Leaves alone: what is not in a dataflow block, and heads, which `prune_redundant_heads` compares.
"""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import IRModule, relax
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm.config import GRAPH_RULES
from sits_tvm.report import AttentionRewrite, Report

from ._adjoint import bindings_of
from ._map_functions import map_functions
from .prune_rules.block import SHARED, BlockRules, Row


@tvm.transform.module_pass(opt_level=0, name="PruneRedundantAttention")
class PruneRedundantAttention:
    """Exact rewrites, each a rule with a proof; see `sits_tvm.config.GRAPH_RULES`.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(
                x: R.Tensor((1, 2, "s", 8), "float32"), k: R.Tensor((1, 1, "s", 8), "float32")
            ):
                s = T.int64()
                with R.dataflow():
                    scaled = R.multiply(x, R.const(1.0, "float32"))
                    flat = R.reshape(scaled, (2, s, 8))
                    q = R.reshape(flat, (1, 2, s, 8))
                    repeated = R.repeat(k, 2, axis=1)
                    v = R.tanh(repeated)
                    again = R.tanh(repeated)
                    y = R.sits.attention(
                        q, repeated, v, causal=0, window=0, scale=0.25, softcap=0.0,
                        empty_row="zero", softmax_dtype="float32",
                    )
                    z = R.add(y, again)
                    R.output(z)
                return z

    After::

        @I.ir_module
        class After:
            @R.function
            def main(
                x: R.Tensor((1, 2, "s", 8), "float32"), k: R.Tensor((1, 1, "s", 8), "float32")
            ) -> R.Tensor((1, 2, "s", 8), "float32"):
                s = T.int64()
                with R.dataflow():
                    repeated = R.repeat(k, 2, axis=1)
                    v = R.tanh(repeated)
                    y = R.sits.attention(
                        x, repeated, v, causal=0, window=0, scale=0.25, softcap=0.0,
                        empty_row="nan", softmax_dtype="float32",
                    )
                    z = R.add(y, v)
                    R.output(z)
                return z

    Every type stays as it is, dimension by dimension.

    Parameters
    ----------
    rules : names from `GRAPH_RULES`; default all

        ``views``: chains of reshapes, permutations, broadcasts and slices that move no element,
        or that one reshape, permutation or broadcast is.
        ``common-subexpressions``: the same op on the same arguments, once per dataflow block; not
        dropout, nor opaque calls.
        ``repeated-heads``: keys and values before `R.sits.attention` that repeat heads in groups.
        ``double-stabilisation``: the row maximum subtracted before a softmax in float32 or
        float64. A row of -inf alone, or with +inf, is NaN in both.
        ``neutral-operations``: times 1, plus the integer 0, minus 0, a cast to the same dtype; a
        bias of 0 or True, an offset and a window that hide nothing.
        ``hidden-keys``: keys at either end that offset, window or a constant mask hide from all
        queries, for finite values.
        ``empty-rows``: the value of rows that see no key, and guards behind a softmax, where every
        row sees one, for finite scores.
        ``uniform-rows``: attention with equal, finite scores and no mask is the mean of its values.
        ``score-bound``: a fact, no rewrite: how large scores of normalized q and k can get.
    report : Report, optional
        Gets a row in `attention_rewrites` per rewrite: what was proved, and from what. A rule that
        found its pattern but not the proof has one, too, with `changed` False.

    Raises
    ------
    ValueError
        For a rule that does not exist.
    """

    def __init__(
        self, rules: Collection[str] = GRAPH_RULES, *, report: Report | None = None
    ) -> None:
        is_names = isinstance(rules, Collection) and not isinstance(rules, str)
        unknown = [name for name in (rules if is_names else [rules]) if name not in GRAPH_RULES]
        if unknown:
            raise ValueError(f"rules={unknown}: write a set of {', '.join(GRAPH_RULES)}")
        self.rules = frozenset(rules)
        self.report = report if report is not None else Report()

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        rows: dict[str, list[Row]] = {}

        def visit(name: str, func: relax.Function) -> relax.Function:
            pruner = _Pruner(mod, func, self.rules)
            result = pruner.visit_expr(func)
            rows[name] = pruner.rows
            return result if any(row.changed for row in pruner.rows) else func

        result = map_functions(mod, visit)
        if not result.same_as(mod):
            result = relax.transform.DeadCodeElimination()(result)
        for name, found in rows.items():
            self.report.attention_rewrites += _reported(name, found, result[name])
        return result


def _reported(name: str, rows: list[Row], func: relax.Function) -> list[AttentionRewrite]:
    """Without values that are shared, but that nothing reads any more."""
    live = {binding.var for binding in bindings_of(func)}
    return [
        AttentionRewrite(name, row.binding.name, row.rule, row.changed, row.reason)
        for row in rows
        if row.rule != SHARED or row.binding in live
    ]


@mutator
class _Pruner(PyExprMutator):
    """One function. What is not in a dataflow block stays as it is."""

    def __init__(self, mod: IRModule, function: relax.Function, rules: frozenset[str]) -> None:
        super().__init__(mod)
        self.function, self.rules = function, rules
        self.rows: list[Row] = []
        self.block: BlockRules | None = None

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        outer, self.block = self.block, BlockRules(self.builder_, self.function, self.rules)
        result = super().visit_dataflow_block_(block)
        self.rows += self.block.rows
        self.block = outer
        return result

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        outer, self.block = self.block, None
        result = super().visit_binding_block_(block)
        self.block = outer
        return result

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if self.block is None:
            super().visit_var_binding_(binding)
            return
        self.block.binding = binding.var
        super().visit_var_binding_(binding)
        var = self.visit_expr(binding.var)
        value = self.lookup_binding(var)
        if not isinstance(value, relax.Var):
            self.block.define(var, value)
        elif isinstance(var, relax.DataflowVar):
            self.set_var_remap(binding.var, value)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        return self.simplified(super().visit_call_(call))

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        return self.simplified(super().visit_tuple_getitem_(item))

    def simplified(self, value: relax.Expr) -> relax.Expr:
        if self.block is None:
            return value
        return self.block.simplified(self.builder_.normalize(value))
