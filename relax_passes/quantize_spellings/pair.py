"""Read `R.sits.dequantize` of `R.sits.quantize` as one fake quantization."""

from __future__ import annotations

import numpy as np
import tvm_ffi
from tvm import relax
from tvm.ir import Op

from tir_schedules.quantization.affine import AffineFormat

from .._values import Values
from ..op._affine import format_of
from .events import CLIPS, MOVES, Refused, is_integer

DEQUANTIZE, _QUANTIZE = "sits.dequantize", "sits.quantize"
_ON_CODES = {
    *("add", "astype", "broadcast_to", "concat", "flip", "repeat", "strided_slice", "subtract"),
    *("take", "tile", *CLIPS, *MOVES),
}
_DEPTH = 12
_INSTEAD = "write R.sits.fake_quantize, and the other ops before or after it"

Step = tuple[str, relax.Call]


def read_pair(
    values: Values, var: relax.Var, call: relax.Call
) -> tuple[str, relax.Call | Refused, bool] | None:
    """(form, the op that `call` amounts to or why none, whether the gradient is lost)."""
    steps = _steps(values, call.args[0], _DEPTH)
    if steps is None:
        return None
    (_, inner), *between = steps
    casts = [str(step.ty.dtype) for name, step in between if name == "astype"]
    changes = [name for name, _ in between if name != "astype"]
    form = ", ".join(["quantize", *changes, "dequantize"])
    if changes:
        ops = ", ".join(f"R.{name}" for name in changes)
        message = f"the codes go through {ops} between quantize and dequantize"
        lost = any(_truncates(name, step) for name, step in between)
        return form, Refused("codes-changed", message, _INSTEAD), lost
    if not all(_holds(dtype, format_of(inner)) for dtype in casts):
        message = f"the codes are cast to {', '.join(casts)}, which does not hold them all"
        return form, Refused("cast-before-clip", message), True
    return form, _fused(values, var, inner, call), False


def _steps(values: Values, codes: relax.Expr, depth: int) -> list[Step] | None:
    """The ops from `R.sits.quantize` to `codes`, in order; None if none leads there."""
    name, call = values.call(codes)
    if name == _QUANTIZE:
        return [(name, call)]
    if name not in _ON_CODES or depth == 0:
        return None
    joined = values.of(call.args[0])
    for arg in joined.fields if isinstance(joined, relax.Tuple) else call.args:
        steps = _steps(values, arg, depth - 1)
        if steps is not None:
            return [*steps, (name, call)]
    return None


def _truncates(name: str, step: relax.Call) -> bool:
    """Whether a step is a cast from a float to an integer, of which there is no gradient."""
    if name != "astype" or not is_integer(str(step.ty.dtype)):
        return False
    return "float" in str(step.args[0].ty.dtype)


def _fused(
    values: Values, var: relax.Var, inner: relax.Call, call: relax.Call
) -> relax.Call | Refused:
    x, *parameters = inner.args
    attrs = {key: inner.attrs[key] for key in inner.attrs.keys()}  # noqa: SIM118, no dict
    alike = len(call.args) == len(inner.args) and all(
        map(values.same, call.args[1:], inner.args[1:])
    )
    if not alike or any(not tvm_ffi.structural_equal(attrs[k], call.attrs[k]) for k in attrs):
        message = "quantize and dequantize differ in scale, zero point or attributes"
        return Refused("two-scales", message, "give both the same")
    if var.ty.dtype != x.ty.dtype:
        message = f"x is {x.ty.dtype}, and dequantize gives {var.ty.dtype}"
        return Refused("two-dtypes", message, "write out_dtype of x")
    return relax.Call(Op.get("relax.sits.fake_quantize"), [x, *parameters], inner.attrs)


def _holds(dtype: str, form: AffineFormat) -> bool:
    if not is_integer(dtype):
        return dtype == "float32"
    info = np.iinfo(dtype)
    return bool(info.min <= form.lo and form.hi <= info.max)
