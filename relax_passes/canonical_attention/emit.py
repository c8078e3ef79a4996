"""Emit a planned block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import tvm_ffi
from tvm import relax
from tvm.relax import op as R

from ..op.attention import attention
from .bounds import Masking
from .graph import NearMiss, dtype_of
from .masks import Lookup, MaskReader
from .operands import Recipe
from .plan import Plan
from .scores import Mask


class Emitter:
    """Emits into `bb`; `visit` gives the expression that stands for one of the old function."""

    def __init__(
        self, bb: relax.BlockBuilder, lookup: Lookup, visit: Callable[[relax.Expr], relax.Expr]
    ) -> None:
        self.bb, self.lookup, self.visit = bb, lookup, visit

    def emit(self, plan: Plan) -> tuple[relax.Expr, str, relax.Call, str]:
        """The value product anew, the op's binding and call, and what was proved of its masks.

        Raises
        ------
        NearMiss
            For masks that the op cannot say.
        """
        masking, scores_dtype = self._masking(plan)
        q, k, v = (self._cast(self._tensor(r), plan.dtype) for r in plan.placed.operands)
        call = attention(
            q,
            k,
            v,
            masking.bias,
            scale=plan.scale,
            causal=masking.causal,
            window=masking.window,
            softcap=plan.softcap,
            empty_row=masking.empty_row,
            scores_dtype=scores_dtype,
            softmax_dtype=plan.softmax_dtype,
        )
        proof = "; ".join(filter(None, (masking.proof, plan.note)))
        if plan.call is not None and _is_same(call, plan.call):
            return plan.call, plan.result.name, plan.call, proof
        named = self.bb.emit(call, plan.result.name)  # as all rows of a report call it
        out = self._cast(named, dtype_of(plan.result))
        return plan.placed.out.emit(self.bb, out), named.name, call, proof

    def _masking(self, plan: Plan) -> tuple[Masking, str]:
        """What the masks say, and the dtype of the scores in which they say it."""
        if plan.masking is not None:
            return self._given(plan.masking), plan.scores_dtypes[0]
        masks = [(mask, self._tensor(r)) for mask, r in plan.placed.masks]
        *others, last = plan.scores_dtypes
        for dtype in others:
            try:
                return self._read(plan, masks, dtype), dtype
            except NearMiss as found:
                if found.code != "mask-added-in-float16":
                    raise
        return self._read(plan, masks, last), last

    def _read(self, plan: Plan, masks: Sequence[tuple[Mask, relax.Expr]], dtype: str) -> Masking:
        shape = plan.placed.frame.extents
        rows = plan.zero_rows, plan.uniform_rows
        return MaskReader(self.bb, self.lookup, shape, dtype, *rows).read(masks)

    def _given(self, masking: Masking) -> Masking:
        bias = None if masking.bias is None else self.visit(masking.bias)
        return replace(masking, bias=bias)

    def _tensor(self, recipe: Recipe) -> relax.Expr:
        return recipe.emit(self.bb, self.visit(recipe.source))

    def _cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        return x if dtype_of(x) == dtype else self.bb.emit(R.astype(x, dtype))


def _is_same(a: relax.Call, b: relax.Call) -> bool:
    same_args = len(a.args) == len(b.args) and all(map(relax.Expr.same_as, a.args, b.args))
    return same_args and a.op == b.op and tvm_ffi.structural_equal(a.attrs, b.attrs)
