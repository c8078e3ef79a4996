"""`relax.sits.absmax_scale`: scales that span the largest element of each group."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import relax
from tvm.ir import Op

from tir_schedules.quantization import absmax_scale as kernels
from tir_schedules.quantization.affine import AffineFormat

from ._affine import FLOATS, attribute_problems, raise_problems
from ._register import register_op

_NAME = "relax.sits.absmax_scale"


def absmax_scale(
    x: relax.Expr,
    *,
    bits: int = 4,
    axis: int = -1,
    group_size: int = -1,
    symmetric: bool = True,
    scale_dtype: str = "float32",
) -> relax.Call:
    """The scale of each group of x, computed at run time; `fake_quantize` takes it as it is.

    Symmetric: max |x| / (2^(bits-1) - 1), for signed codes. Asymmetric, for unsigned codes, with
    low = min(x, 0) and high = max(x, 0): (high - low) / (2^bits - 1), and the zero point
    rne(-low / scale). Bit for bit the scales of `packing`: rounded to `scale_dtype`,
    1 for a group of zeros. No gradient flows through it (the scale is a constant to training).

    Parameters
    ----------
    x : Tensor of float16, bfloat16 or float32
        Of rank 1 or more; computed in float32.
    bits : int
        2…8.
    axis, group_size : int
        Groups of `group_size` consecutive elements along `axis`, the last may be shorter; -1 is one
        group. A scale per token is ``axis=-1, group_size=-1``.
    symmetric : bool
    scale_dtype : str
        "float16" or "float32": the dtype in which the scale is deployed.

    Returns
    -------
    Call
        float32, of the rank of x with one element per group at `axis`; asymmetric: a tuple of it
        and the zero point, uint8 of the same shape.

    Raises
    ------
    ValueError
        For an argument outside these, where the call gets its type.
    """
    attrs = {
        "bits": bits,
        "axis": axis,
        "group_size": group_size,
        "symmetric": symmetric,
        "scale_dtype": scale_dtype,
    }
    return relax.Call(Op.get(_NAME), [x], attrs)


def _form(call: relax.Call) -> AffineFormat:
    attrs = call.attrs
    return AffineFormat(
        bits=int(attrs["bits"]),
        axis=int(attrs["axis"]),
        group_size=int(attrs["group_size"]),
        signed=bool(attrs["symmetric"]),
    )


def _validate(call: relax.Call) -> None:
    raise_problems(call, _problems(dict(call.attrs.items())))


def _problems(attrs: dict[str, Any]) -> list[str]:
    symmetric, scale_dtype = attrs["symmetric"], attrs["scale_dtype"]
    shared = {key: attrs[key] for key in ("bits", "axis", "group_size")}
    rest = {"signed": True, "narrow_range": False, "clip_mask": "rounded", "scale_dtype": None}
    problems = list(attribute_problems({**rest, **shared}))
    if not isinstance(symmetric, bool):
        problems.append(f"symmetric={symmetric!r} is not True or False")
    if scale_dtype not in ("float16", "float32"):
        problems.append(f"scale_dtype={scale_dtype!r} is not 'float16' or 'float32'")
    if attrs["group_size"] is None:
        problems.append("group_size=None: write -1 for one group along the axis")
    return problems


def _infer(call: relax.Call, _: relax.BlockBuilder) -> relax.Type:
    _validate(call)
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in FLOATS:
        raise_problems(call, [f"x is {ty}, expected a tensor of {', '.join(FLOATS)}"])
    form = _form(call)
    if not -ty.ndim <= form.axis < ty.ndim:
        raise_problems(call, [f"axis={form.axis} does not exist in x, {ty}"])
    if ty.shape is None:
        raise_problems(call, [f"the shape of x is not known, it is {ty}; R.match_cast it"])
    shape = form.param_shape(list(ty.shape), ty.ndim)
    scale = relax.TensorType(shape, "float32", ty.vdevice)
    if form.signed:
        return scale
    return relax.TupleType([scale, relax.TensorType(shape, "uint8", ty.vdevice)])


def _legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    kernel = partial(kernels.absmax_scale, _form(call), str(call.attrs["scale_dtype"]))
    return bb.call_te(kernel, call.args[0], primfunc_name_hint="absmax_scale")


def _gradient(_v: relax.Var, call: relax.Call, _g: relax.Var, _bb: relax.BlockBuilder) -> list:
    return [relax.op.grad.no_grad(call.args[0])]


register_op(
    _NAME,
    _infer,
    absmax_scale,
    legalize=_legalize,
    validate=_validate,
    gradient=_gradient,
)
