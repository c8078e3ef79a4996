"""Write an attention for the heads that are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from .attention_projections import AttentionWeights
from .plan import Part
from .selection import Selection
from .selector import HeadSelector
from .weight_edits import WeightEdits
from .writers import ContinueFrom, ReplaceRows, SelectRows


@dataclass(frozen=True)
class SitePlan:
    """What becomes of one attention.

    `outputs` holds, per part, the rows of the output projection's weight, (channels, N);
    `constant` (N,) is what the removed heads add to the output, None for nothing.
    """

    site: AttentionWeights
    parts: Sequence[Part]
    outputs: Sequence[np.ndarray]
    constant: np.ndarray | None


@mutator
class HeadRewriter(PyExprMutator):
    """Rewrites the output projections of the planned attentions, and with them all behind."""

    def __init__(
        self,
        mod: IRModule,
        bound: Mapping[relax.Var, relax.Expr],
        plans: Sequence[SitePlan],
        edits: WeightEdits,
    ) -> None:
        super().__init__(mod)
        self.bound, self.edits = bound, edits
        self.plans = {plan.site.product: plan for plan in plans}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        plan = self.plans.get(binding.var)
        if plan is None:
            super().visit_var_binding_(binding)
            return
        value = self.builder_.normalize(self._product(plan))
        inside = self.builder_.current_block_is_dataflow()
        is_output = inside and not isinstance(binding.var, relax.DataflowVar)
        emit = self.builder_.emit_output if is_output else self.builder_.emit
        self.set_var_remap(binding.var, emit(value, binding.var.name))

    def _product(self, plan: SitePlan) -> relax.Expr:
        qkv = self._projected(plan.site, plan.parts)
        joined, at = [], [0, 0, 0]
        for part in plan.parts:
            counts = [len(chosen) for chosen in _chosen(part)]
            slices = [self._heads(*x) for x in zip(qkv, at, counts, strict=True)]
            joined.append(self._joined(plan.site, part, slices))
            at = [begin + count for begin, count in zip(at, counts, strict=True)]
        inputs = joined[0] if len(joined) == 1 else self.builder_.emit(R.concat(joined, axis=-1))
        weight = self._output_weight(plan.site, np.concatenate(plan.outputs))
        call = self.bound[plan.site.product]
        product = relax.Call(call.op, [inputs, weight], call.attrs)
        if plan.constant is None:
            return product
        return self._add_constant(plan.site, plan.constant, product)

    def _projected(self, site: AttentionWeights, parts: Sequence[Part]) -> list[relax.Expr]:
        """q, k and v with the heads of all parts, one part after the other."""
        sources = [leaf.source for trace in site.traces.values() for leaf in trace.leaves]
        found = []
        for i, (name, arg) in enumerate(zip("qkv", site.call.args, strict=False)):
            heads = [head for part in parts for head in _chosen(part)[i]]
            is_packed = any(sources.count(leaf.source) > 1 for leaf in site.traces[name].leaves)
            writer = SelectRows(self, self.edits, f".{name}" if is_packed else "")
            selection = Selection.of(1, np.array(heads))
            found.append(HeadSelector(self.bound, writer).select(arg, selection))
        return found

    def _heads(self, x: relax.Expr, begin: int, count: int) -> relax.Expr:
        if count == int(x.ty.shape[1]):
            return x
        return self.builder_.emit(R.strided_slice(x, [1], [begin], [begin + count]))

    def _joined(self, site: AttentionWeights, part: Part, qkv: list[relax.Expr]) -> relax.Expr:
        """The left operand of the output projection, for one part."""
        q, k, v = qkv
        v = v if part.width == 1 else self._side_by_side(v, part.width)
        bias = [self._bias(arg, _chosen(part)[0]) for arg in site.call.args[3:]]
        call = relax.Call(site.call.op, [q, k, v, *bias], site.call.attrs)
        writer = ContinueFrom(self, self.builder_.emit(call, site.variable.name))
        selector = HeadSelector(self.bound, writer, frozenset([site.variable]))
        heads = len(_chosen(part)[0]) * part.width
        size = site.value_dim
        channels = Selection.blocks(site.joined.ty.ndim - 1, size * heads, size)
        return selector.select(site.joined, channels)

    def _add_constant(
        self, site: AttentionWeights, constant: np.ndarray, product: relax.Expr
    ) -> relax.Expr:
        """What removed heads add to every row of the output, as one more weight."""
        [leaf] = site.o.leaves
        name = getattr(leaf.source, "name", "").removesuffix(".weight") + ".folded_bias"
        bias = self.edits.add(leaf.source, constant, name)
        product = self.builder_.emit(product)
        if bias.ty.dtype != product.ty.dtype:
            bias = self.builder_.emit(R.astype(bias, str(product.ty.dtype)))
        return R.add(product, bias)

    def _side_by_side(self, v: relax.Expr, width: int) -> relax.Expr:
        """(B, G·width, Sk, Dv) → (B, G, Sk, width·Dv)"""
        batch, heads, keys, dim = v.ty.shape
        groups, emit = int(heads) // width, self.builder_.emit
        v = emit(R.reshape(v, [batch, groups, width, keys, dim]))
        v = emit(R.permute_dims(v, [0, 1, 3, 2, 4]))
        return emit(R.reshape(v, [batch, groups, keys, width * dim]))

    def _bias(self, bias: relax.Expr, heads: list[int]) -> relax.Expr:
        """A mask of each head its own is looked up."""
        kept, axis = self.visit_expr(bias), bias.ty.ndim - 3
        if axis < 0 or tvm.sym.Analyzer().can_prove_equal(bias.ty.shape[axis], 1):
            return kept
        return self.builder_.emit(R.take(kept, relax.const(np.array(heads), "int64"), axis=axis))

    def _output_weight(self, site: AttentionWeights, rows: np.ndarray) -> relax.Expr:
        """The weight operand of the output projection, holding `rows` (channels, N)."""
        writer = ReplaceRows(self, self.edits, rows)
        weight = self.bound[site.product].args[1]
        selection = Selection.blocks(weight.ty.ndim - 2, len(rows), site.value_dim)
        return HeadSelector(self.bound, writer).select(weight, selection)


def _chosen(part: Part) -> tuple[list[int], list[int], list[int]]:
    """The query heads, keys and values of a part, by their numbers of before."""
    first = [alike[0] for alike in part.classes]
    heads = [alike[0] for group in first for alike in group.heads]
    values = [group.index for alike in part.classes for group in alike]
    return heads, [group.index for group in first], values
