"""Bring given scales and zero points into the order in which packed weights hold them, in TE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx

from ..int4_format.packed_layout import SYMMETRIC_ZERO, PackedLayout
from .affine import AffineFormat, rounded_zero_point, stored_scale

Expr = Any


def arrange_groups(
    form: AffineFormat,
    layout: PackedLayout,
    transposed: bool,
    scale: te.Tensor,
    zero_point: te.Tensor | None = None,
) -> list[te.Tensor]:
    """Scale in its stored dtype and zero point as uint8 codes, both (tiles, groups, lanes).

    What `quantize_weight.choose_scale` gives, from the scale and zero point that
    `fake_quantize` takes. Rows beyond the weight get scale 1.
    """
    shape = [tirx.IntImm("int64", extent) for extent in layout.shapes[1]]
    offset = SYMMETRIC_ZERO if form.signed else 0

    def arranged(value: Callable[[list[Expr]], Expr], missing: Expr, name: str) -> te.Tensor:
        def at(tile: Expr, group: Expr, lane: Expr) -> Expr:
            row = layout.row_at(tile, lane)
            index = _index(form, layout, transposed, len(scale.shape), row, group)
            return tirx.if_then_else(row < layout.n, value(index), missing)

        return te.compute(shape, at, name=name)

    def zero_at(index: list[Expr]) -> Expr:
        if zero_point is None:
            return tirx.const(offset, "uint8")
        return (rounded_zero_point(form, zero_point(*index)) + float(offset)).astype("uint8")

    dtype = layout.spec.scale_dtype
    missing_zero = tirx.const(layout.padding_code, "uint8")
    return [
        arranged(
            lambda index: stored_scale(form, scale(*index)).astype(dtype),
            tirx.const(1, dtype),
            "scale",
        ),
        arranged(zero_at, missing_zero, "zero"),
    ]


def _index(
    form: AffineFormat,
    layout: PackedLayout,
    transposed: bool,
    rank: int,
    row: Expr,
    group: Expr,
) -> list[Expr]:
    """Where the scale of a group as stored is in a tensor of `rank`."""
    if rank < 2:
        return [row][:rank]
    whole = form.group_size == -1 or layout.spec.group_size == -1
    given = tirx.const(0, "int64") if whole else group * layout.group_size // form.group_size
    return [given, row] if transposed else [row, given]
