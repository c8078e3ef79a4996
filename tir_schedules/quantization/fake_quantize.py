"""Kernels of affine quantization: fake quantize, quantize, dequantize, and sums over groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tvm import te, tirx

from .affine import AffineFormat, Element, stored_scale
from .group_sums import sum_per_param

# Attribute of the PrimFunc of `fake_quantize_grad`: the fields of its AffineFormat.
FORMAT_ATTR = "sits.affine_format"
Expr: TypeAlias = Any
Index: TypeAlias = Sequence[Expr]


def fake_quantize(
    form: AffineFormat, x: te.Tensor, scale: te.Tensor, zero_point: te.Tensor | None = None
) -> te.Tensor:
    """(q - z') * s of x, in the dtype of x."""

    def value(*at: tirx.Var) -> Expr:
        return Element.of(
            form, x(*at), scale, zero_point, form.param_index(at, len(scale.shape))
        ).value.astype(x.dtype)

    return te.compute(x.shape, value, name="fake_quantize")


def quantize(
    form: AffineFormat, x: te.Tensor, scale: te.Tensor, zero_point: te.Tensor | None = None
) -> te.Tensor:
    """The codes q of x, in int8 or uint8."""

    def code(*at: tirx.Var) -> Expr:
        return Element.of(
            form, x(*at), scale, zero_point, form.param_index(at, len(scale.shape))
        ).stored_code

    return te.compute(x.shape, code, name="quantize")


def dequantize(
    form: AffineFormat,
    out_dtype: str,
    q: te.Tensor,
    scale: te.Tensor,
    zero_point: te.Tensor | None = None,
) -> te.Tensor:
    """(q - z') * s of integer codes q, subtracted in float32."""

    def value(*at: tirx.Var) -> Expr:
        code = Element.of(form, q(*at), scale, zero_point, form.param_index(at, len(scale.shape)))
        return ((code.x - code.zero_point) * code.scale).astype(out_dtype)

    return te.compute(q.shape, value, name="dequantize")


def range_mask(
    form: AffineFormat,
    part: str,
    x: te.Tensor,
    scale: te.Tensor,
    zero_point: te.Tensor | None = None,
) -> te.Tensor:
    """Bool: where x is "inside" the range, or "clipped"; a NaN is neither."""

    def mask(*at: tirx.Var) -> Expr:
        element = Element.of(
            form, x(*at), scale, zero_point, form.param_index(at, len(scale.shape))
        )
        return element.inside if part == "inside" else element.clipped

    return te.compute(x.shape, mask, name="range_mask")


def expand_scale(form: AffineFormat, scale: te.Tensor, x: te.Tensor) -> te.Tensor:
    """The scale of every element of x, float32."""
    return te.compute(
        x.shape,
        lambda *at: stored_scale(form, scale(*form.param_index(at, len(scale.shape)))),
        name="expand_scale",
    )


def sum_groups(form: AffineFormat, x: te.Tensor, scale: te.Tensor) -> te.Tensor:
    """The sum of the elements of x that share a scale, in the shape of the scale, float32."""

    def term(at: Index, _: Index) -> Expr:
        return x(*at).astype("float64")

    return sum_per_param(form, x.shape, scale.shape, "float32", term, "sum_groups")


def fake_quantize_tangent(
    form: AffineFormat,
    tangents: list[te.Tensor],
    x: te.Tensor,
    scale: te.Tensor,
    zero_point: te.Tensor | None = None,
) -> te.Tensor:
    """float32 change of `fake_quantize` along tangents of x, scale and float zero point."""
    zero = tirx.const(0, "float32")

    def change(*at: tirx.Var) -> Expr:
        e = Element.of(form, x(*at), scale, zero_point, form.param_index(at, len(scale.shape)))
        index = form.param_index(at, len(scale.shape))
        dx, ds, *dz = (t(*(index if i else at)).astype("float32") for i, t in enumerate(tangents))
        total = tirx.Select(e.inside, dx, zero)
        total += (e.along_scale(ds) / e.scale.astype("float64")).astype("float32")
        for one in dz:
            total += tirx.Select(e.clipped, -e.scale * one, zero)
        return total

    return te.compute(x.shape, change, name="fake_quantize_tangent")


def fake_quantize_grad(
    form: AffineFormat,
    gy: te.Tensor,
    x: te.Tensor,
    scale: te.Tensor,
    zero_point: te.Tensor | None = None,
) -> list[te.Tensor]:
    """dx, ds and, for a float zero point, dz of `fake_quantize`.

    With M the clip mask, and y64 = (q - z') * s exact in float64::

        dx = select(M, gy, 0)
        ds = sum(gy * (y64 - select(M, x, 0))) / s    = sum(gy * (M ? r - x / s : q - z'))
        dz = -s * sum(select(M, 0, gy))

    A NaN element counts nothing.
    """

    def element(at: Index, index: Index) -> Element:
        return Element.of(form, x(*at), scale, zero_point, index)

    def gradient(*at: tirx.Var) -> Expr:
        index = form.param_index(at, len(scale.shape))
        return x_partial(gy(*at), element(at, index)).astype(x.dtype)

    def step(at: Index) -> Expr:
        return stored_scale(form, scale(*at)).astype("float64")

    def to_param(param: te.Tensor, term: Callable, name: str, finish: Callable) -> te.Tensor:
        def at_element(at: Index, index: Index) -> Expr:
            return term(gy(*at), element(at, index))

        return sum_per_param(form, x.shape, scale.shape, param.dtype, at_element, name, finish)

    dx = te.compute(x.shape, gradient, name="dx")
    ds = to_param(scale, scale_term, "ds", lambda total, at: total / step(at))
    if zero_point is None or not is_float(zero_point.dtype):
        return [dx, ds]
    dz = to_param(zero_point, zero_point_term, "dz", lambda total, at: total * step(at))
    return [dx, ds, dz]


def x_partial(gy: Expr, element: Element) -> Expr:
    """gy dy/dx."""
    return tirx.Select(element.inside, gy, tirx.const(0, gy.ty.dtype))


def scale_term(gy: Expr, element: Element) -> Expr:
    """gy dy/ds times s, in float64."""
    return element.along_scale(gy)


def zero_point_term(gy: Expr, element: Element) -> Expr:
    """gy dy/dz divided by s, in float64."""
    return tirx.Select(element.clipped, -gy.astype("float64"), tirx.const(0, "float64"))


def is_float(dtype: object) -> bool:
    """float16, bfloat16 or float32, as opposed to an integer."""
    return "float" in str(dtype)
