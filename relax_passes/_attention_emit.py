"""Emit a planned block."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.relax import op as R

from relax_passes._attention_graph import NearMiss, dtype_of, widest
from relax_passes._attention_masks import Lookup, Masking, MaskReader
from relax_passes._attention_operands import Recipe
from relax_passes._attention_plan import Plan
from relax_passes.op.attention import attention

_HALF = ("float16", "bfloat16")


class Emitter:
    """Emits into `bb`; `visit` gives the expression that stands for one of the old function."""

    def __init__(
        self, bb: relax.BlockBuilder, lookup: Lookup, visit: Callable[[relax.Expr], relax.Expr]
    ) -> None:
        self.bb, self.lookup, self.visit = bb, lookup, visit

    def emit(self, plan: Plan) -> tuple[relax.Expr, relax.Call, str]:
        """The value product anew, the call of the op, and what was proved of its masks.

        Raises
        ------
        NearMiss
            For masks that the op cannot say.
        """
        masking, softmax_dtype = self._masking(plan)
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
            softmax_dtype=softmax_dtype,
        )
        out = self._cast(self.bb.emit(call), dtype_of(plan.result))
        return plan.placed.out.emit(self.bb, out), call, masking.proof

    def _masking(self, plan: Plan) -> tuple[Masking, str]:
        """Half-precision softmax is computed in float32, unless its masks need the narrow dtype."""
        narrow = widest(plan.scores_dtype, plan.dtype)
        masks = [(mask, self._tensor(r)) for mask, r in plan.placed.masks]

        def read(dtype: str) -> tuple[Masking, str]:
            shape = plan.placed.frame.extents
            reader = MaskReader(self.bb, self.lookup, shape, dtype, plan.is_zero)
            return reader.read(masks), dtype

        try:
            return read("float32" if narrow in _HALF else narrow)
        except NearMiss as found:
            if found.code != "mask-added-in-float16" or narrow != "float16":
                raise
            return read(narrow)

    def _tensor(self, recipe: Recipe) -> relax.Expr:
        return recipe.emit(self.bb, self.visit(recipe.source))

    def _cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        return x if dtype_of(x) == dtype else self.bb.emit(R.astype(x, dtype))
