"""Ops whose derivative is zero wherever it exists: comparisons, steps, and what makes constants."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax
from tvm.ir import Op
from tvm.relax import op as R

from ._rules import gradient

_STEPS = {"floor", "ceil", "trunc", "sign"}
_COMPARISONS = {
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf", "isfinite"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "floor_divide"),
}
_CHOICES = {"argmax", "argmin", "argsort", "one_hot", "nonzero", "bucketize"}
_MAKERS = {
    *("arange", "eye", "eye_like", "ones", "ones_like", "zeros"),
    *("zeros_like", "hamming_window", "shape_of", "shape_to_tensor", "tensor_to_shape"),
    "grad.no_grad",
}


def _registered(names: Iterable[str]) -> frozenset[str]:
    known = set(map(str, Op.list_op_names()))
    return frozenset(f"relax.{name}" for name in names) & known


ZERO_GRADIENT = _registered({*_STEPS, *_COMPARISONS, *_CHOICES, *_MAKERS})
"""Full names. A variable that one of these computes has no gradient to give."""


@gradient(*(name.removeprefix("relax.") for name in sorted(ZERO_GRADIENT)))
def _zero(
    var: relax.Var, call: relax.Call, g: relax.Expr, bb: relax.BlockBuilder
) -> list[relax.Expr]:
    return [R.grad.no_grad(arg) for arg in call.args]
