"""Replace weights of a function by others, made of them: arguments, arrays and constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator
from tvm.runtime import Tensor


def as_numpy(value: Tensor | np.ndarray) -> np.ndarray:
    return value.numpy() if isinstance(value, Tensor) else np.asarray(value)


def unit_roundoff(dtype: np.dtype) -> float:
    """2⁻¹¹ for float16, 2⁻²⁴ for float32."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


@dataclass
class WeightEdits:
    """The weights of one function: those there are, and those made here.

    Attributes
    ----------
    params : by name
    made : for each argument, the arguments that take its place, and their arrays
    """

    params: Mapping[str, Tensor | np.ndarray]
    made: dict[relax.Var, dict[relax.Var, np.ndarray]] = field(default_factory=dict)

    def array(self, source: relax.Expr) -> np.ndarray:
        """Of an argument or a constant."""
        value = source.value if isinstance(source, GenericConst) else self.params[source.name]
        return as_numpy(value)

    def add(self, source: relax.Expr, array: np.ndarray, name: str) -> relax.Expr:
        """An argument beside `source`, or where that is a constant a constant, in its dtype."""
        dtype = str(source.ty.dtype)
        array = np.ascontiguousarray(array.astype(self.array(source).dtype))
        if isinstance(source, GenericConst):
            return relax.const(array, dtype)
        taken = {v.name for made in self.made.values() for v in made} | self.params.keys()
        while name in taken - {source.name}:
            name += "_"
        variable = relax.Var(name, relax.TensorType(array.shape, dtype))
        self.made.setdefault(source, {})[variable] = array
        return variable

    def finish(
        self, func: relax.Function, rewriter: PyExprMutator
    ) -> tuple[relax.Function, dict[str, np.ndarray]]:
        """`func` rewritten, with the arguments that are left and those made; their arrays."""
        body = rewriter.visit_expr(func).body
        arguments = [v for a in func.params for v in (a, *self.made.get(a, ()))]
        draft = relax.Function(arguments, body, None, func.is_pure, func.attrs)
        body = relax.analysis.remove_all_unused(draft).body
        used = set(relax.analysis.free_vars(body))
        kept = [a for a in arguments if a not in self.made or a in used]
        out = relax.Function(kept, body, None, func.is_pure, func.attrs)
        return out, {v.name: array for made in self.made.values() for v, array in made.items()}
