"""`relax.sits.fake_quantize`, `quantize` and `dequantize`: affine quantization per tensor, channel
or group, with gradients to the tensor, the scale and the zero point.

With s the scale, r = rne(x / s), z' = clamp(rne(z), lo, hi), u = r + z', q = clamp(u, lo, hi)::

    quantize(x) = q        dequantize(q) = (q - z') * s        fake_quantize(x) = (q - z') * s

and, with the clip mask M (lo <= u <= hi), sums over the elements that share a parameter::

    dx = select(M, gy, 0)
    ds = sum(gy * (M ? r - x / s : q - z'))     dz = sum(gy * (M ? 0 : -s))

Learned step size quantization (Esser et al. 2020), with the zero point of LSQ+ (Bhalgat et al.
2020) and PyTorch's mask; `clip_mask="strict"` is the mask of the LSQ paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tvm import relax

from tir_schedules.quantization import fake_quantize as kernels

from . import _fake_quantize_gradient as gradients
from ._affine import (
    FLOATS,
    INTEGERS,
    affine_attributes,
    call_kernel,
    call_of,
    format_of,
    legalize_with,
    raise_problems,
    validate,
    with_dtype,
)
from ._affine_types import tensor_problems
from ._register import register_op


def fake_quantize(
    x: relax.Expr,
    scale: relax.Expr,
    zero_point: relax.Expr | None = None,
    *,
    bits: int = 4,
    axis: int = -1,
    group_size: int | None = None,
    signed: bool = True,
    narrow_range: bool = False,
    clip_mask: str = "rounded",
    scale_dtype: str | None = None,
) -> relax.Call:
    """Quantize and dequantize in float, for training.

    Parameters
    ----------
    x : Tensor of float16, bfloat16 or float32
        Computed in float32. NaN gives NaN; infinities clip.
    scale : Tensor of float16, bfloat16 or float32
        Rank 0, or (x.shape[axis],); with `group_size` g the shape of x with ceil(d / g) (1 for -1)
        at `axis`. A constant must be positive and finite. A run-time scale of 0 clips every
        element to a code that stands for 0, and makes x = 0 and the gradient of the scale NaN.
    zero_point : Tensor in the shape of scale, optional
        int8, uint8, int32 or int64, or a float to learn; used as z' above, 0 without. A constant
        must be a code.
    bits : int
        Width of a code, 2…8.
    axis : int
        Of the channels or groups; negative counts from the end.
    group_size : int, optional
        Consecutive elements along `axis` that share a scale, the last group may be shorter; -1 is
        one group.
    signed, narrow_range : bool
        lo…hi is -2**(bits-1)…2**(bits-1)-1, or 0…2**bits-1; a narrow range starts one higher.
    clip_mask : str
        M: "rounded" lo <= u <= hi, or "strict" lo < x / s + z' < hi.
    scale_dtype : str, optional
        "float16" (or another float): the dtype in which the scale is deployed. The scale is
        rounded to it, with gradient 1.

    Returns
    -------
    Call
        Shape and dtype of x.

    Raises
    ------
    SitsError
        For an attribute outside these; all of them. Arguments are checked where the call gets its
        type (`BlockBuilder.emit`, TVMScript), as a ValueError that lists all that is wrong.
    """
    form = _form(bits, axis, group_size, signed, narrow_range, clip_mask, scale_dtype)
    return _call("fake_quantize", [x, scale, zero_point], form)


def quantize(
    x: relax.Expr,
    scale: relax.Expr,
    zero_point: relax.Expr | None = None,
    *,
    bits: int = 4,
    axis: int = -1,
    group_size: int | None = None,
    signed: bool = True,
    narrow_range: bool = False,
    clip_mask: str = "rounded",
    scale_dtype: str | None = None,
) -> relax.Call:
    """The codes q of x, in int8 or (unsigned) uint8; NaN becomes z'. Arguments as above.

    Its gradients, for an upstream h: dx = h M / s, ds = -sum(h M x / s²), dz = sum(h M).
    """
    form = _form(bits, axis, group_size, signed, narrow_range, clip_mask, scale_dtype)
    return _call("quantize", [x, scale, zero_point], form)


def dequantize(
    q: relax.Expr,
    scale: relax.Expr,
    zero_point: relax.Expr | None = None,
    *,
    bits: int = 4,
    axis: int = -1,
    group_size: int | None = None,
    signed: bool = True,
    narrow_range: bool = False,
    clip_mask: str = "rounded",
    scale_dtype: str | None = None,
    out_dtype: str | None = None,
) -> relax.Call:
    """(q - z') * s of codes q in int8, uint8, int32 or int64, subtracted in float32.

    `out_dtype` is by default that of the scale; other arguments as above. Its gradients:
    dq = gy s (float32), ds = sum(gy (q - z')), dz = -sum(gy s).
    """
    form = _form(bits, axis, group_size, signed, narrow_range, clip_mask, scale_dtype)
    return _call("dequantize", [q, scale, zero_point], {**form, "out_dtype": out_dtype})


def _form(
    bits: int,
    axis: int,
    group_size: int | None,
    signed: bool,
    narrow_range: bool,
    clip_mask: str,
    scale_dtype: str | None,
) -> dict[str, Any]:
    return {
        "bits": bits,
        "axis": axis,
        "group_size": group_size,
        "signed": signed,
        "narrow_range": narrow_range,
        "clip_mask": clip_mask,
        "scale_dtype": scale_dtype,
    }


def _call(name: str, args: Sequence[relax.Expr | None], attributes: dict[str, Any]) -> relax.Call:
    checked = affine_attributes(f"R.sits.{name}", attributes)
    return call_of(name, [arg for arg in args if arg is not None], checked)


def _infer_fake_quantize(call: relax.Call, bb: relax.BlockBuilder) -> relax.TensorType:
    raise_problems(call, list(tensor_problems(call, bb, call.args, {"x": FLOATS})))
    return call.args[0].ty


def _infer_quantize(call: relax.Call, bb: relax.BlockBuilder) -> relax.TensorType:
    x = _infer_fake_quantize(call, bb)
    return with_dtype(x, format_of(call).code_dtype)


def _infer_dequantize(call: relax.Call, bb: relax.BlockBuilder) -> relax.TensorType:
    raise_problems(call, list(tensor_problems(call, bb, call.args, {"q": INTEGERS})))
    return with_dtype(call.args[0].ty, _out_dtype(call))


def _out_dtype(call: relax.Call) -> str:
    given = call.attrs["out_dtype"]
    return str(call.args[1].ty.dtype) if given is None else str(given)


def _legalize_dequantize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    kernel = partial(kernels.dequantize, format_of(call), _out_dtype(call))
    return call_kernel(bb, call, kernel, *call.args)


register_op(
    "relax.sits.fake_quantize",
    _infer_fake_quantize,
    fake_quantize,
    legalize=legalize_with(kernels.fake_quantize),
    validate=validate,
    gradient=gradients.of_fake_quantize,
)
register_op(
    "relax.sits.quantize",
    _infer_quantize,
    quantize,
    legalize=legalize_with(kernels.quantize),
    validate=validate,
    gradient=gradients.of_quantize,
)
register_op(
    "relax.sits.dequantize",
    _infer_dequantize,
    dequantize,
    legalize=_legalize_dequantize,
    validate=validate,
    gradient=gradients.of_dequantize,
)
