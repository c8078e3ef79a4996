"""Affine quantization in TE: the range of the codes, which scale belongs to which element, codes.

One definition for every kernel of ours that quantizes. Arithmetic is float32: divide (no
reciprocal), round half to even, then add the zero point, clamp in float, cast last. Comparisons
and selects instead of min and max, which lose NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx

from ..cpu.compute_bfloat16 import bfloat16_bits, float32_of

Expr = Any  # tirx.Expr, with its operators


@dataclass(frozen=True, kw_only=True)
class AffineFormat:
    """How a tensor x is quantized.

    Parameters
    ----------
    bits : int
        2…8.
    axis : int
        The axis of channels or groups; negative counts from the end. Unused with one scale.
    group_size : int or None
        None: one scale (rank 0), or one per index of `axis` (rank 1). g > 0: one per g consecutive
        elements along `axis`, the last group may be shorter; the scale has the rank of x. -1: one
        group along `axis`.
    signed, narrow_range : bool
        Codes -2**(bits-1)…2**(bits-1)-1, or 0…2**bits-1; a narrow range starts one higher.
    clip_mask : str
        "rounded": an element is inside the range when its code before clamping is. "strict": when
        lo < x / scale + zero_point < hi.
    scale_dtype : str or None
        The scale is rounded to this dtype before it is used; None uses it as it is.
    """

    bits: int = 4
    axis: int = -1
    group_size: int | None = None
    signed: bool = True
    narrow_range: bool = False
    clip_mask: str = "rounded"
    scale_dtype: str | None = None

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> AffineFormat:
        """From what TVM makes of the fields, as attributes of a call or of a PrimFunc."""
        group_size, scale_dtype = attributes["group_size"], attributes["scale_dtype"]
        return cls(
            bits=int(attributes["bits"]),
            axis=int(attributes["axis"]),
            group_size=None if group_size is None else int(group_size),
            signed=bool(attributes["signed"]),
            narrow_range=bool(attributes["narrow_range"]),
            clip_mask=str(attributes["clip_mask"]),
            scale_dtype=None if scale_dtype is None else str(scale_dtype),
        )

    @property
    def lo(self) -> int:
        return (-(1 << (self.bits - 1)) if self.signed else 0) + int(self.narrow_range)

    @property
    def hi(self) -> int:
        return (1 << (self.bits - int(self.signed))) - 1

    @property
    def code_dtype(self) -> str:
        return "int8" if self.signed else "uint8"

    def param_shape(self, shape: Sequence[Expr], param_rank: int) -> list[Expr]:
        """The shape of a scale of rank `param_rank` for an x of `shape`."""
        if self.group_size is None:
            return [] if param_rank == 0 else [shape[self.axis]]
        groups = list(shape)
        groups[self.axis] = self.group_count(shape[self.axis])
        return groups

    def group_count(self, extent: Expr) -> Expr:
        assert self.group_size is not None
        if self.group_size == -1:
            return 1
        return (extent + (self.group_size - 1)) // self.group_size

    def param_index(self, at: Sequence[Expr], param_rank: int) -> list[Expr]:
        """Where the scale of the element at `at` is."""
        if self.group_size is None:
            return [] if param_rank == 0 else [at[self.axis]]
        index = list(at)
        index[self.axis] = (
            tirx.const(0, at[self.axis].ty.dtype)
            if self.group_size == -1
            else at[self.axis] // self.group_size
        )
        return index


@dataclass(frozen=True)
class Element:
    """One element of x with the scale s and zero point z' that it is quantized with, in float32."""

    form: AffineFormat
    x: Expr
    scale: Expr
    zero_point: Expr

    @classmethod
    def of(
        cls,
        form: AffineFormat,
        x: Expr,
        scale: te.Tensor | tirx.Buffer,
        zero_point: te.Tensor | tirx.Buffer | None,
        index: Sequence[Expr],
    ) -> Element:
        """The element with value `x`, whose scale and zero point are at `index`."""
        z = (
            _float32(0)
            if zero_point is None
            else rounded_zero_point(form, zero_point[tuple(index)])
        )
        return cls(form, x.astype("float32"), stored_scale(form, scale[tuple(index)]), z)

    @property
    def ratio(self) -> Expr:
        return self.x / self.scale

    @property
    def unclamped(self) -> Expr:
        return tirx.nearbyint(self.ratio) + self.zero_point

    @property
    def exact(self) -> Expr:
        return self.ratio + self.zero_point

    @property
    def code(self) -> Expr:
        """Float; NaN where x / scale is."""
        return clamp(self.unclamped, self.form.lo, self.form.hi)

    @property
    def stored_code(self) -> Expr:
        """Integer; z' where x / scale is NaN, of which every comparison is False."""
        u, lo, hi = self.unclamped, _float32(self.form.lo), _float32(self.form.hi)
        above = tirx.Select(u > hi, hi, self.zero_point)
        code = tirx.Select(tirx.all(u >= lo, u <= hi), u, tirx.Select(u < lo, lo, above))
        return code.astype(self.form.code_dtype)

    @property
    def value(self) -> Expr:
        """What the code stands for; NaN where x / scale is."""
        return (self.code - self.zero_point) * self.scale

    @property
    def inside(self) -> Expr:
        """Whether the element is in the range of the codes; False for NaN."""
        if self.form.clip_mask == "strict":
            return tirx.all(self.exact > self.form.lo, self.exact < self.form.hi)
        return tirx.all(self.unclamped >= self.form.lo, self.unclamped <= self.form.hi)

    @property
    def clipped(self) -> Expr:
        """Whether the element is outside the range; False for NaN."""
        if self.form.clip_mask == "strict":
            return tirx.any(self.exact <= self.form.lo, self.exact >= self.form.hi)
        return tirx.any(self.unclamped < self.form.lo, self.unclamped > self.form.hi)

    def along_scale(self, weight: Expr) -> Expr:
        """weight dy/ds s in float64: weight (y - x) inside the range, weight y where clipped.

        0 for NaN. y is exact: a small integer times a float32.
        """
        y = (self.code - self.zero_point).astype("float64") * self.scale.astype("float64")
        weight = weight.astype("float64")
        outside = tirx.Select(self.clipped, weight * y, tirx.const(0, "float64"))
        return tirx.Select(self.inside, weight * (y - self.x.astype("float64")), outside)


def stored_scale(form: AffineFormat, scale: Expr) -> Expr:
    """float32 scale, after rounding to `scale_dtype`."""
    if form.scale_dtype == "bfloat16":
        return float32_of(bfloat16_bits(scale.astype("float32")))
    if form.scale_dtype is not None:
        scale = scale.astype(form.scale_dtype)
    return scale.astype("float32")


def rounded_zero_point(form: AffineFormat, zero_point: Expr) -> Expr:
    """z' = clamp(rne(z), lo, hi) in float32; a NaN becomes lo."""
    z = tirx.nearbyint(zero_point.astype("float32"))
    lo, hi = _float32(form.lo), _float32(form.hi)
    return tirx.Select(z > lo, tirx.Select(z < hi, z, hi), lo)


def clamp(x: Expr, lo: int, hi: int) -> Expr:
    """lo…hi, NaN where x is NaN."""
    low, high = _float32(lo), _float32(hi)
    return tirx.Select(x < low, low, tirx.Select(x > high, high, x))


def _float32(value: float) -> Expr:
    return tirx.const(value, "float32")
