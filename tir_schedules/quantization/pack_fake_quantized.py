"""Pack a weight with scales and zero points that are given: learned, or of a QDQ model.

An integer weight is the codes themselves. Those of a float weight are `fake_quantize`'s, so that
what the parts stand for is what it returns, bit for bit (for a float16 weight: before it rounds its
result to float16). Signed codes and their zero points are stored with 8 added, which
`(code - zero) * scale` does not see.
"""

from __future__ import annotations

import numpy as np

from sits_tvm.config import GROUP_SIZES, QuantSpec

from ..int4_format.packed_layout import SYMMETRIC_ZERO, PackedLayout
from ..int4_format.packing import Parts, assemble
from ..int4_format.rounding import Quantized, cut_groups, round_to_codes
from .affine import AffineFormat


def packed_layout(
    form: AffineFormat,
    shape: tuple[int, int],
    scale_rank: int,
    *,
    transposed: bool,
    scale_dtype: str,
    has_zero_point: bool,
    order: str = "rows",
) -> PackedLayout:
    """Where the codes of a fake-quantized weight go.

    Parameters
    ----------
    form : AffineFormat
        How the weight is quantized as it is stored.
    shape : (n, k), or (k, n) when `transposed`
    scale_rank : int
        0 (per tensor), 1 (per channel) or 2 (groups).
    scale_dtype : str
        Of the scale's tensor.
    has_zero_point : bool
    order : str

    Raises
    ------
    ValueError
        Where the format cannot express it, saying why.
    """
    n, k = reversed(shape) if transposed else shape
    if form.bits > 4:
        raise ValueError(f"its codes have {form.bits} bits; INT4 weights have at most 4")
    along_k = form.axis % 2 == (0 if transposed else 1)
    if scale_rank and along_k != (scale_rank == 2):
        raise ValueError(
            f"its scales lie along axis {form.axis}; a product needs groups along the input "
            "channels, or a scale per output channel"
        )
    stored = form.scale_dtype if scale_dtype == "float32" and form.scale_dtype else scale_dtype
    if stored not in ("float16", "float32"):
        raise ValueError(f"its scales are {stored}; INT4 weights have float16 or float32")
    spec = QuantSpec(
        bits=form.bits,
        group_size=_group_size(form, k),
        symmetric=form.signed and not has_zero_point,
        scale_dtype=stored,
    )
    return PackedLayout(n, k, spec, order)


def _group_size(form: AffineFormat, k: int) -> int:
    """The largest group of ours that divides the given one; scales are repeated for it."""
    if form.group_size in GROUP_SIZES:
        return form.group_size
    if form.group_size is None or form.group_size >= k:
        return -1
    for size in sorted(GROUP_SIZES, reverse=True):
        if size > 0 and form.group_size % size == 0:
            return size
    raise ValueError(f"its groups have {form.group_size} elements; write a multiple of 32")


def code_bounds(form: AffineFormat) -> tuple[int, int]:
    """The smallest and the largest code as stored."""
    offset = _offset(form)
    return form.lo + offset, form.hi + offset


def pack_fake_quantized(
    weight: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    form: AffineFormat,
    layout: PackedLayout,
    *,
    transposed: bool,
) -> Parts:
    """The parts of ``fake_quantize(weight, scale, zero_point)`` in `layout`, see `packing`; of an
    integer weight, of ``dequantize(weight, scale, zero_point)``.

    Raises
    ------
    ValueError
        For a weight or zero point that is not finite, or a scale that is not positive and finite
        in the dtype in which it is stored. For codes beyond their range; their scales may be zero
        or negative.
    """
    rows = weight.T if transposed else weight
    scales = _per_group(scale, form, layout, transposed).astype("float32")
    with np.errstate(over="ignore"):
        scales = scales.astype(layout.spec.scale_dtype)
    zeros = _zero_points(zero_point, form, layout, transposed)
    holds_codes = weight.dtype.kind in "iu"
    if holds_codes:
        _check_codes(weight, scales, form)
    else:
        _check(weight, scales)

    def quantized(part: slice) -> Quantized:
        groups = cut_groups(np.asarray(rows[part], "float32"), layout)
        if holds_codes:
            codes = groups + np.float32(_offset(form))
            codes[:, -1, layout.k - layout.padded_k + layout.group_size :] = zeros[part][:, -1:]
        else:
            codes = round_to_codes(groups, scales[part], zeros[part], code_bounds(form))
        flat = codes.astype("uint8").reshape(len(codes), layout.padded_k)
        return flat, scales[part], None if layout.spec.symmetric else zeros[part].astype("uint8")

    return assemble(layout, quantized)


def _zero_points(
    zero_point: np.ndarray | None, form: AffineFormat, layout: PackedLayout, transposed: bool
) -> np.ndarray:
    """z' + 8 (unsigned: z') for each group, float32."""
    if zero_point is None:
        return np.full((layout.n, layout.groups), _offset(form), "float32")
    values = _per_group(zero_point, form, layout, transposed).astype("float32")
    if not np.isfinite(values).all():
        raise ValueError("a zero point is not finite")
    return np.clip(np.rint(values), form.lo, form.hi) + np.float32(_offset(form))


def _per_group(
    parameter: np.ndarray, form: AffineFormat, layout: PackedLayout, transposed: bool
) -> np.ndarray:
    """A scale or zero point of any granularity as (n, groups)."""
    if parameter.ndim < 2:
        values = np.reshape(parameter, (-1, 1))
    else:
        values = parameter.T if transposed else parameter
        if layout.groups > values.shape[1]:
            assert form.group_size is not None
            values = np.repeat(values, form.group_size // layout.group_size, axis=1)
    return np.broadcast_to(values[:, : layout.groups], (layout.n, layout.groups))


def _offset(form: AffineFormat) -> int:
    return SYMMETRIC_ZERO if form.signed else 0


def _check_codes(codes: np.ndarray, scales: np.ndarray, form: AffineFormat) -> None:
    if codes.size and not form.lo <= codes.min() <= codes.max() <= form.hi:
        raise ValueError(f"its codes are {codes.min()}…{codes.max()}, not {form.lo}…{form.hi}")
    bad = int((~np.isfinite(scales)).sum())
    if bad:
        raise ValueError(f"{bad} of {scales.size} scales are not finite in {scales.dtype}")


def _check(weight: np.ndarray, scales: np.ndarray) -> None:
    if not np.isfinite(np.asarray(weight, "float32")).all():
        raise ValueError("the weight holds NaN or infinite values")
    bad = ~(np.isfinite(scales) & (scales > 0))
    if bad.any():
        row, group = (int(i[0]) for i in np.nonzero(bad))
        raise ValueError(
            f"{bad.sum()} of {bad.size} scales are not positive and finite in {scales.dtype}, "
            f"the first is {scales[row, group]} of output channel {row}, group {group}"
        )
