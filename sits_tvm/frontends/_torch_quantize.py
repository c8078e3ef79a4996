"""Converters of fake quantization, and of quantize and dequantize pairs. Imports torch.

PyTorch documents round(x / scale) and computes round(x * (1 / scale)) in float32. We import what it
documents: the quotient, as `R.sits.fake_quantize` and the deployed integers have it. Both agree
where the scale is a power of two. Otherwise they may take neighbouring codes where x / scale is
within an ulp of a tie: of random float32 numbers 3 in 60 million, of exact ties one in eleven
(measured with PyTorch 2.13 on a CPU). A note says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op as R

from relax_passes.op import dequantize, fake_quantize, quantize
from relax_passes.quantize_spellings.range import Refused, code_width

from ..diagnostics import Diagnostic
from ..diagnostics import emit as report
from ._torch_helpers import Node, cast, emit, result_dtype

_ATTRIBUTES = ("bits", "signed", "narrow_range")


def _per_tensor(node: Node, imp: Any) -> tuple[relax.Expr, None]:
    """(x, scale, zero point, low, high), the last four numbers; result and its mask."""
    x, scale, zero, low, high = node.args
    return _fake_quantize(node, imp, x, scale, zero, (low, high)), None


def _per_tensor_tensors(node: Node, imp: Any) -> tuple[relax.Expr, None]:
    x, scale, zero, enabled, low, high = node.args
    if not (isinstance(enabled, Node) and enabled.target.__name__ == "full.default"):
        raise ValueError("fake_quant_enabled is a tensor; export the model with a constant")
    if not enabled.args[1]:
        return imp.env[x], None
    return _fake_quantize(node, imp, x, scale, zero, (low, high)), None


def _per_channel(node: Node, imp: Any) -> tuple[relax.Expr, None]:
    x, scale, zero, axis, low, high = node.args
    return _fake_quantize(node, imp, x, scale, zero, (low, high), axis), None


def _learnable(node: Node, imp: Any) -> relax.Expr:
    """The factor of the gradient of scale and zero point is no part of the derivative."""
    x, scale, zero, *axis, low, high = node.args[: 6 if "channel" in node.target.__name__ else 5]
    factor = node.args[-1] if len(node.args) > 5 + len(axis) else 1.0
    if factor != 1:
        message = f"grad_factor={factor} is not part of the gradient; put it into the learning rate"
        report(Diagnostic.note("gradient-factor", message, function="main", binding=node.name))
    return _fake_quantize(node, imp, x, scale, zero, (low, high), *axis)


def _fake_quantize(
    node: Node,
    imp: Any,
    x: Node,
    scale: Any,
    zero: Any,
    bounds: tuple[int, int],
    axis: int | None = None,
) -> relax.Expr:
    parameters = _parameters(node, imp, scale, zero, axis)
    return emit(imp, fake_quantize(imp.env[x], *parameters, **_form(bounds, axis)))


def _quantize(node: Node, imp: Any) -> relax.Expr:
    """(x, scale, zero point, [axis,] low, high, dtype) of `quantized_decomposed`."""
    x, scale, zero, *axis, low, high, _ = node.args
    parameters = _parameters(node, imp, scale, zero, *axis)
    codes = emit(imp, quantize(imp.env[x], *parameters, **_form((low, high), *axis)))
    return cast(imp, codes, result_dtype(node))


def _dequantize(node: Node, imp: Any) -> relax.Expr:
    """The same arguments; codes of over 8 bits in plain arithmetic."""
    q, scale, zero, *axis, low, high, _ = node.args
    node.kwargs.get("out_dtype")  # torch already applied it to the type of the result
    codes, dtype = imp.env[q], result_dtype(node)
    parameters = _parameters(None, imp, scale, zero, *axis)
    try:
        form = _form((low, high), *axis)
    except Refused:
        wide = [_beside(imp, p, codes, *axis) for p in parameters]
        steps = cast(imp, codes, "float32")
        steps = emit(imp, R.subtract(steps, cast(imp, wide[1], "float32"))) if wide[1:] else steps
        return cast(imp, emit(imp, R.multiply(steps, wide[0])), dtype)
    return emit(imp, dequantize(codes, *parameters, **form, out_dtype=dtype))


def _form(bounds: tuple[int, int], axis: int | None = None) -> dict[str, Any]:
    attributes = dict(zip(_ATTRIBUTES, code_width(*bounds), strict=True))
    return attributes if axis is None else {**attributes, "axis": axis}


def _parameters(
    node: Node | None, imp: Any, scale: Any, zero: Any, axis: int | None = None
) -> list[relax.Expr]:
    """Scale in float32, and the zero point unless it is the number 0; of rank 0 without an axis."""
    if node is not None and not _is_power_of_two(scale):
        message = "PyTorch multiplies by 1 / scale: at ties of x / scale its codes may differ"
        report(Diagnostic.note("torch-reciprocal", message, function="main", binding=node.name))
    found = [_tensor(imp, scale, "float32")]
    if isinstance(zero, Node) or zero:
        found.append(_tensor(imp, zero, "int32"))
    if axis is None:
        found = [p if p.ty.ndim == 0 else emit(imp, R.reshape(p, [])) for p in found]
    elif len(found) == 2 and found[1].ty.ndim == 0:
        found[1] = emit(imp, R.broadcast_to(found[1], found[0].ty.shape))
    return [cast(imp, found[0], "float32"), *found[1:]]


def _tensor(imp: Any, value: Any, dtype: str) -> relax.Expr:
    return imp.env[value] if isinstance(value, Node) else relax.const(np.asarray(value, dtype))


def _beside(imp: Any, parameter: relax.Expr, x: relax.Expr, axis: int | None = None) -> relax.Expr:
    """A vector along `axis`, in the rank of x."""
    if axis is None or parameter.ty.ndim == 0:
        return parameter
    others = [i for i in range(x.ty.ndim) if i != axis % x.ty.ndim]
    return emit(imp, R.expand_dims(parameter, others))


def _is_power_of_two(scale: Any) -> bool:
    return isinstance(scale, float) and scale > 0 and math.frexp(np.float32(scale))[0] == 0.5


QUANTIZE: dict[str, Callable[[Node, Any], Any]] = {
    "fake_quantize_per_tensor_affine_cachemask.default": _per_tensor,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _per_tensor_tensors,
    "fake_quantize_per_channel_affine_cachemask.default": _per_channel,
    "_fake_quantize_learnable_per_tensor_affine.default": _learnable,
    "_fake_quantize_learnable_per_channel_affine.default": _learnable,
    **{f"quantize_per_{kind}": _quantize for kind in ("tensor.default", "tensor.tensor")},
    **{f"dequantize_per_{kind}": _dequantize for kind in ("tensor.default", "tensor.tensor")},
    "quantize_per_channel.default": _quantize,
    "dequantize_per_channel.default": _dequantize,
}
