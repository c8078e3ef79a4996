"""A call of `relax.sits.attention` as the rules read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax, tirx

from .._tensors import shape_of
from ..index_analysis.index_domain import Index, integer
from ..op.attention import ATTRIBUTES, attention
from .rule import Scope

ATTENTION = frozenset({"relax.sits.attention"})


@dataclass(frozen=True)
class AttentionCall:
    """Operands, extents of the scores (B, H, Sq, Sk), and attributes as Python values.

    `offset` is the position of the first query: key 0 has position 0.
    """

    q: relax.Expr
    k: relax.Expr
    v: relax.Expr
    bias: relax.Expr | None
    scores: tuple[Index, Index, Index, Index]
    attrs: dict[str, Any]
    scope: Scope

    @classmethod
    def of(cls, call: relax.Call, scope: Scope) -> AttentionCall | None:
        """None where a shape is unknown."""
        q, k, v = call.args[:3]
        bias = call.args[3] if len(call.args) > 3 else None
        if any(shape_of(x) is None for x in call.args):
            return None
        scores = (*list(q.ty.shape)[:3], k.ty.shape[2])
        attrs = {name: _plain(call.attrs[name]) for name in ATTRIBUTES}
        return cls(q, k, v, bias, scores, attrs, scope)

    @property
    def num_queries(self) -> Index:
        return self.scores[2]

    @property
    def num_keys(self) -> Index:
        return self.scores[3]

    @property
    def is_causal(self) -> bool:
        return self.attrs["causal"] is not None

    @property
    def window(self) -> int:
        return int(self.attrs["window"])

    @property
    def offset(self) -> Index:
        causal = self.attrs["causal"]
        if causal == "bottom_right":
            return self.scope.dims.simplify(self.num_keys - self.num_queries)
        return integer(causal or 0)

    def replaced(self, **changed: Any) -> relax.Call:
        """The call with other operands or attributes."""
        q, k, v, bias = (changed.pop(n, getattr(self, n)) for n in ("q", "k", "v", "bias"))
        return attention(q, k, v, bias, **{**self.attrs, **changed})

    def visible(self) -> np.ndarray | None:
        """What constant bias, offset and window show: (…, Sq or 1, Sk or 1); None if not known."""
        bias = np.ones((), bool) if self.bias is None else self.scope.constant(self.bias)
        if bias is None:
            return None
        lowest = float(ml_dtypes.finfo(self.attrs["scores_dtype"]).min)
        shown = bias if bias.dtype == bool else bias > lowest / 2  # a sum with less may be -inf
        shown = shown.reshape((1,) * (2 - bias.ndim) + bias.shape)
        if not self.is_causal and self.window == 0:
            return shown
        if not all(isinstance(n, tirx.IntImm) for n in (self.num_queries, self.num_keys)):
            return None
        query = np.arange(int(self.num_queries))[:, None] + int(self.offset)
        key = np.arange(int(self.num_keys))
        if self.is_causal:
            shown = shown & (key <= query)
        return shown & (key > query - self.window) if self.window else shown


def _plain(value: Any) -> Any:
    if isinstance(value, tirx.IntImm):
        return int(value)
    return float(value) if isinstance(value, tirx.FloatImm) else value
