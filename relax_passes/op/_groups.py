"""Ops by which gradients of quantization are written: masks, scales per element, sums per scale.

`relax.sits.range_mask`, `relax.sits.expand_scale` and its transpose `relax.sits.sum_groups`. Their
attributes are those of `fake_quantize`; a scale stands also for a zero point or a partial.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

from tvm import relax
from tvm.relax import op as R
from tvm.relax.op.grad import no_grad

from tir_schedules.quantization import fake_quantize as kernels

from ._affine import (
    FLOATS,
    attributes_of,
    call_kernel,
    call_of,
    call_sums,
    format_of,
    legalize_with,
    raise_problems,
    validate,
    with_dtype,
)
from ._affine_types import tensor_problems
from ._register import register_op

Builder: TypeAlias = relax.BlockBuilder
Partials: TypeAlias = list[relax.Expr]


def range_mask(*args: relax.Expr, part: str = "inside", **attributes: Any) -> relax.Call:
    """R.sits.range_mask(x, scale[, zero_point]): where x is "inside" the range, or "clipped"; bool.

    A NaN is neither.
    """
    return call_of("range_mask", args, {**attributes, "part": part})


def expand_scale(scale: relax.Expr, x: relax.Expr, **attributes: Any) -> relax.Call:
    """R.sits.expand_scale(scale, x): the scale of every element of x, float32."""
    return call_of("expand_scale", (scale, x), attributes)


def sum_groups(x: relax.Expr, scale: relax.Expr, **attributes: Any) -> relax.Call:
    """R.sits.sum_groups(x, scale): the sum of the elements that share each scale, float32."""
    return call_of("sum_groups", (x, scale), attributes)


def unrounded(form: dict[str, Any]) -> dict[str, Any]:
    """For what is no scale but has the shape of one."""
    return {**form, "scale_dtype": None}


def cast_like(bb: Builder, x: relax.Expr, like: relax.Expr) -> relax.Expr:
    return cast(bb, x, str(like.ty.dtype))


def cast(bb: Builder, x: relax.Expr, dtype: str) -> relax.Expr:
    return x if str(x.ty.dtype) == dtype else bb.emit(R.astype(x, dtype))


def sum_for(
    bb: Builder, term: relax.Expr, parameter: relax.Expr, form: dict[str, Any]
) -> relax.Expr:
    """The partial for a scale or zero point; an integer has none."""
    if not kernels.is_float(parameter.ty.dtype):
        return no_grad(parameter)
    total = bb.emit(sum_groups(term, parameter, **unrounded(form)))
    return cast_like(bb, total, parameter)


def _of_expand_scale(_: relax.Var, call: relax.Call, g: relax.Var, bb: Builder) -> Partials:
    return [sum_for(bb, g, call.args[0], attributes_of(call)), no_grad(call.args[1])]


def _of_sum_groups(_: relax.Var, call: relax.Call, g: relax.Var, bb: Builder) -> Partials:
    x, scale = call.args
    dx = bb.emit(expand_scale(g, x, **unrounded(attributes_of(call))))
    return [cast_like(bb, dx, x), no_grad(scale)]


def _of_range_mask(_: relax.Var, call: relax.Call, g: relax.Var, bb: Builder) -> Partials:
    return [no_grad(arg) for arg in call.args]


def _infer_range_mask(call: relax.Call, bb: Builder) -> relax.TensorType:
    raise_problems(call, list(tensor_problems(call, bb, call.args, {"x": FLOATS})))
    return with_dtype(call.args[0].ty, "bool")


def _infer_expand_scale(call: relax.Call, _: Builder) -> relax.TensorType:
    return with_dtype(call.args[1].ty, "float32")


def _infer_sum_groups(call: relax.Call, _: Builder) -> relax.TensorType:
    return with_dtype(call.args[1].ty, "float32")


def _legalize_range_mask(bb: Builder, call: relax.Call) -> relax.Expr:
    kernel = partial(kernels.range_mask, format_of(call), str(call.attrs["part"]))
    return call_kernel(bb, call, kernel, *call.args)


def _legalize_sum_groups(bb: Builder, call: relax.Call) -> relax.Expr:
    return call_sums(bb, call, kernels.sum_groups)


register_op(
    "relax.sits.range_mask",
    _infer_range_mask,
    range_mask,
    legalize=_legalize_range_mask,
    validate=validate,
    gradient=_of_range_mask,
)
register_op(
    "relax.sits.expand_scale",
    _infer_expand_scale,
    expand_scale,
    legalize=legalize_with(kernels.expand_scale),
    validate=validate,
    gradient=_of_expand_scale,
)
register_op(
    "relax.sits.sum_groups",
    _infer_sum_groups,
    sum_groups,
    legalize=_legalize_sum_groups,
    validate=validate,
    gradient=_of_sum_groups,
)
