"""Projections of attention of exactly deficient rank become two factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir import IRModule
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.runtime import Tensor

from sits_tvm.report import AttentionRewrite

from ..packed_weights.weight_sites import weights_of
from .attention_projections import (
    AttentionWeights,
    FunctionUses,
    Leaf,
    find_attention_weights,
)
from .low_rank import FACTOR, Factors, Screening, low_rank_factors
from .plan import Group, Part
from .private_weights import reason_against
from .rewrite import HeadRewriter, SitePlan
from .weight_edits import WeightEdits, unit_roundoff

Params = Mapping[str, Tensor | np.ndarray]


@dataclass(frozen=True)
class Projection:
    """The rows of a weight that make q, k or v, or read the heads ("o").

    `product` multiplies by them, and by those of the others too where `is_packed`.
    """

    name: str
    product: relax.Var
    leaf: Leaf
    is_packed: bool

    def matrix(self, edits: WeightEdits) -> np.ndarray:
        """(N, K), of the rows of this projection."""
        array = edits.array(self.leaf.source)
        if self.name == "o":
            return array if self.leaf.selection.axis == 1 else array.T
        rows = array.take(self.leaf.selection.index, self.leaf.selection.axis)
        return rows if self.leaf.selection.axis == 0 else rows.T

    @property
    def rows_first(self) -> bool:
        """Stored as (N, K)."""
        return (self.leaf.selection.axis == 0) != (self.name == "o")


def factor_projections(
    name: str,
    func: relax.Function,
    mod: IRModule,
    params: Params,
    rows: list[AttentionRewrite],
    screening: Screening,
) -> tuple[relax.Function, dict[str, np.ndarray]]:
    """`func` with factors for projections, their arrays, and a row per attention in `rows`."""
    uses, edits = FunctionUses.of(func), WeightEdits(params)
    weights = {w for w in weights_of(func) if w.name in params}
    found: list[tuple[Projection, Factors]] = []
    packed: list[SitePlan] = []
    for variable, site in find_attention_weights(name, func, weights):
        reason = site if isinstance(site, str) else reason_against(site, uses, mod)
        factors: list[tuple[Projection, Factors]] = []
        if isinstance(site, AttentionWeights) and reason is None:
            factors, reason = _examine(site, edits, screening)
            if any(projection.is_packed for projection, _ in factors):
                packed.append(_unpacked(site, edits))
        rows.append(AttentionRewrite(name, variable.name, "low-rank", bool(factors), str(reason)))
        found += factors
    if packed:
        return _split_first(name, func, mod, params, uses, packed)
    if not found:
        return func, {}
    return edits.finish(func, _Factorer(mod, uses.bound, found, edits))


def _split_first(
    name: str,
    func: relax.Function,
    mod: IRModule,
    params: Params,
    uses: FunctionUses,
    packed: Sequence[SitePlan],
) -> tuple[relax.Function, dict[str, np.ndarray]]:
    """Weights of q, k and v apart, then factors."""
    edits = WeightEdits(params)
    func, made = edits.finish(func, HeadRewriter(mod, uses.bound, packed, edits))
    func, factors = factor_projections(name, func, mod, {**params, **made}, [], Screening())
    return func, made | factors


def _unpacked(site: AttentionWeights, edits: WeightEdits) -> SitePlan:
    """All heads as they are: their rows of packed weights become weights of their own."""
    ratio = site.num_heads // site.num_kv_heads
    groups = [
        [Group(g, [[h] for h in range(g * ratio, (g + 1) * ratio)])]
        for g in range(site.num_kv_heads)
    ]
    leaf = site.o.leaves[0]
    rows = np.moveaxis(edits.array(leaf.source), leaf.selection.axis, 0)
    blocks = rows.reshape(site.num_heads, site.value_dim, -1)[np.argsort(site.order)]
    return SitePlan(site, [Part(groups)], [blocks.reshape(rows.shape)], None)


def _examine(
    site: AttentionWeights, edits: WeightEdits, screening: Screening
) -> tuple[list[tuple[Projection, Factors]], str]:
    found, reasons = [], []
    for projection in projections_of(site):
        matrix = projection.matrix(edits)
        unit = unit_roundoff(matrix.dtype)
        result = low_rank_factors(matrix, unit, screening)
        shape = f"{projection.name} {matrix.shape[0]}×{matrix.shape[1]}"
        if isinstance(result, Factors):
            found.append((projection, result))
            limit = f"limit {FACTOR:g}·{unit:.1e}"
            result = (
                f"rank {result.left.shape[1]}, ‖W - A·B‖₂ ≤ {result.residual:.1e}·‖W‖₂ ({limit})"
            )
        reasons.append(f"{shape}: {result}")
    missing = [n for n in site.traces if n not in {r.split(" ")[0] for r in reasons}]
    reasons += [f"{n}: its weight is no single matrix" for n in missing]
    return found, "; ".join(reasons)


def projections_of(site: AttentionWeights) -> Iterator[Projection]:
    sources = [leaf.source for trace in site.traces.values() for leaf in trace.leaves]
    for name, trace in site.traces.items():
        products = [site.product] if name == "o" else trace.products
        leaves = [leaf for leaf in trace.leaves if leaf.source.ty.ndim == 2]
        if len(products) == 1 and len(leaves) == 1:
            packed = sources.count(leaves[0].source) > 1
            yield Projection(name, products[0], leaves[0], packed)


@mutator
class _Factorer(PyExprMutator):
    """x Wᵀ → (x Bᵀ) Aᵀ, for W = A B."""

    def __init__(
        self,
        mod: IRModule,
        bound: Mapping[relax.Var, relax.Expr],
        found: Sequence[tuple[Projection, Factors]],
        edits: WeightEdits,
    ) -> None:
        super().__init__(mod)
        self.bound, self.edits = bound, edits
        self.found = {projection.product: (projection, f) for projection, f in found}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self.found:
            super().visit_var_binding_(binding)
            return
        projection, factors = self.found[binding.var]
        call = self.bound[binding.var]
        x = self.visit_expr(call.args[0])
        right = self._operand(projection, factors.right, "right", str(x.ty.dtype))
        left = self._operand(projection, factors.left, "left", str(x.ty.dtype))
        inner = self.builder_.emit(R.matmul(x, right))
        value = self.builder_.normalize(relax.Call(call.op, [inner, left], call.attrs))
        inside = self.builder_.current_block_is_dataflow()
        is_output = inside and not isinstance(binding.var, relax.DataflowVar)
        emit = self.builder_.emit_output if is_output else self.builder_.emit
        self.set_var_remap(binding.var, emit(value, binding.var.name))

    def _operand(
        self, projection: Projection, array: np.ndarray, side: str, dtype: str
    ) -> relax.Expr:
        """(K, r) or (r, N), stored like the weight was."""
        source = projection.leaf.source
        name = f"{getattr(source, 'name', '')}.{side}"
        stored = self.edits.add(source, array if projection.rows_first else array.T, name)
        operand = self.builder_.emit(R.permute_dims(stored)) if projection.rows_first else stored
        if str(operand.ty.dtype) == dtype:
            return operand
        return self.builder_.emit(R.astype(operand, dtype))
