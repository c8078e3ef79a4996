"""Quantize and pack a weight inside the compiled program, bit for bit as `packing.pack` does.

Used where no parameters are given at build time: `<func>_transform_params` then runs these kernels,
`choose_scale`, `pack_codes` and, when asymmetric, `pack_zero_points`, in that order.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from ..int4_format.packed_layout import CODES_PER_WORD, PackedLayout, code_range
from ..int4_format.rounding import MSE_RATIOS


@lru_cache(maxsize=256)
def choose_scale(layout: PackedLayout, dtype: str) -> tirx.PrimFunc:
    """W (n, k) of `dtype` -> scale, zero (tiles, groups, lanes), the latter as uint8 codes."""
    n, k = layout.n, layout.k
    tiles, groups, lanes = layout.shapes[1]
    group_size, spec = layout.group_size, layout.spec
    ratios = MSE_RATIOS if spec.scale_method == "mse" else np.ones(1, "float32")
    smallest = float(np.finfo(spec.scale_dtype).smallest_subnormal)
    reach = (
        (lambda low, high: T.max(-low, high)) if spec.symmetric else (lambda low, high: high - low)
    )
    top = (1 << spec.bits) - 1
    levels = float(top // 2 if spec.symmetric else top)

    @T.prim_func(s_tir=True)
    def choose_scale(
        W: T.Buffer((T.int64(n), T.int64(k)), dtype),
        scale: T.Buffer((T.int64(tiles), T.int64(groups), T.int64(lanes)), spec.scale_dtype),
        zero: T.Buffer((T.int64(tiles), T.int64(groups), T.int64(lanes)), "uint8"),
    ):
        T.func_attr({"tirx.noalias": True})
        for t, j, lane in T.grid(T.int64(tiles), T.int64(groups), T.int64(lanes)):
            with T.sblock("choose_scale"):
                vt, vj, vl = T.axis.remap("SSS", [t, j, lane])
                T.reads(W[0 : T.int64(n), 0 : T.int64(k)])
                T.writes(scale[vt, vj, vl], zero[vt, vj, vl])
                low = T.sblock_alloc_buffer((1,), "float32", scope="local")
                high = T.sblock_alloc_buffer((1,), "float32", scope="local")
                step = T.sblock_alloc_buffer((1,), spec.scale_dtype, scope="local")
                offset = T.sblock_alloc_buffer((1,), "float32", scope="local")
                error = T.sblock_alloc_buffer((1,), "float64", scope="local")
                best = T.sblock_alloc_buffer((1,), "float64", scope="local")
                low[0] = T.float32(0)
                high[0] = T.float32(0)
                for r in range(T.int64(group_size)):
                    low[0] = T.min(low[0], _value(W, layout, vt, vj, vl, r))
                    high[0] = T.max(high[0], _value(W, layout, vt, vj, vl, r))
                best[0] = T.float64(np.inf)
                for c in T.unroll(len(ratios)):
                    step[0] = T.max(
                        T.Cast(
                            spec.scale_dtype,
                            T.if_then_else(
                                reach(low[0], high[0]) == T.float32(0),
                                T.float32(1),
                                reach(low[0], high[0]) / T.float32(levels) * _ratio(ratios, c),
                            ),
                        ),
                        T.Cast(spec.scale_dtype, T.float32(smallest)),
                    )
                    if spec.symmetric:
                        offset[0] = T.float32(8)
                    else:
                        offset[0] = _clip(
                            T.nearbyint(-low[0] * _ratio(ratios, c) / T.Cast("float32", step[0])),
                            code_range(spec),
                        )
                    error[0] = T.float64(0)
                    if len(ratios) > 1:
                        for r in range(T.int64(group_size)):
                            error[0] = error[0] + _square(
                                _value(W, layout, vt, vj, vl, r), step[0], offset[0], spec
                            )
                    if error[0] < best[0]:
                        best[0] = error[0]
                        scale[vt, vj, vl] = step[0]
                        zero[vt, vj, vl] = T.Cast("uint8", offset[0])

    return choose_scale


@lru_cache(maxsize=256)
def pack_codes(
    layout: PackedLayout, dtype: str, bounds: tuple[int, int] | None = None
) -> tirx.PrimFunc:
    """W (n, k), scale, zero (tiles, groups, lanes) -> codes in `layout`.

    `bounds` are the smallest and the largest code, `packing.code_range` unless given.
    """
    bounds = bounds or code_range(layout.spec)
    n, k, group_size = layout.n, layout.k, layout.group_size
    tiles, units, words = layout.shapes[0]
    _, groups, lanes = layout.shapes[1]

    def code_of(weight, scale, zero, *place):  # type: ignore[no-untyped-def]
        row, column = layout.origin(*place)
        (tile, lane), group = layout.lane_at(row), column // group_size
        code = _code(
            _element(weight, layout, row, column),
            scale[tile, group, lane],
            T.Cast("float32", zero[tile, group, lane]),
            bounds,
        )
        return tirx.if_then_else(column < layout.padded_k, code, float(layout.padding_code))

    @T.prim_func(s_tir=True)
    def pack_codes(
        W: T.Buffer((T.int64(n), T.int64(k)), dtype),
        scale: T.Buffer((T.int64(tiles), T.int64(groups), T.int64(lanes)), layout.spec.scale_dtype),
        zero: T.Buffer((T.int64(tiles), T.int64(groups), T.int64(lanes)), "uint8"),
        codes: T.Buffer((T.int64(tiles), T.int64(units), T.int64(words)), "uint32"),
    ):
        T.func_attr({"tirx.noalias": True})
        for t, u, w, i in T.grid(
            T.int64(tiles), T.int64(units), T.int64(words), T.int64(CODES_PER_WORD)
        ):
            with T.sblock("pack_codes"):
                vt, vu, vw, vi = T.axis.remap("SSSR", [t, u, w, i])
                with T.init():
                    codes[vt, vu, vw] = T.uint32(0)
                codes[vt, vu, vw] = codes[vt, vu, vw] | T.shift_left(
                    T.Cast("uint32", code_of(W, scale, zero, vt, vu, vw, vi)),
                    T.Cast("uint32", vi * 4),
                )

    return pack_codes


@lru_cache(maxsize=256)
def pack_zero_points(layout: PackedLayout) -> tirx.PrimFunc:
    """zero (tiles, groups, lanes) uint8 -> zero_point in `layout`."""
    (tiles, units, words), (_, groups, lanes) = layout.shapes[2], layout.shapes[1]

    def zero_of(zero, tile, *place):  # type: ignore[no-untyped-def]
        row, group = layout.zero_origin(*place)
        value = T.Cast("uint32", zero[tile, group, layout.unit.lane(row)])
        return T.if_then_else(group < groups, value, T.uint32(0))

    @T.prim_func(s_tir=True)
    def pack_zero_points(
        zero: T.Buffer((T.int64(tiles), T.int64(groups), T.int64(lanes)), "uint8"),
        packed: T.Buffer((T.int64(tiles), T.int64(units), T.int64(words)), "uint32"),
    ):
        T.func_attr({"tirx.noalias": True})
        for t, u, w, i in T.grid(
            T.int64(tiles), T.int64(units), T.int64(words), T.int64(CODES_PER_WORD)
        ):
            with T.sblock("pack_zero_points"):
                vt, vu, vw, vi = T.axis.remap("SSSR", [t, u, w, i])
                with T.init():
                    packed[vt, vu, vw] = T.uint32(0)
                packed[vt, vu, vw] = packed[vt, vu, vw] | T.shift_left(
                    zero_of(zero, vt, vu, vw, vi), T.Cast("uint32", vi * 4)
                )

    return pack_zero_points


def _value(weight, layout, tile, group, lane, element):  # type: ignore[no-untyped-def]
    """The element of a group in float32, 0 in the padding."""
    row, column = layout.row_at(tile, lane), group * layout.group_size + element
    return _element(weight, layout, row, column)


def _element(weight, layout, row, column):  # type: ignore[no-untyped-def]
    """W[row, column] in float32, 0 in the padding."""
    inside = tirx.all(row < layout.n, column < layout.k)
    return T.if_then_else(inside, T.Cast("float32", weight[row, column]), T.float32(0))


def _code(value, scale, zero, bounds):  # type: ignore[no-untyped-def]
    return _clip(T.nearbyint(value / T.Cast("float32", scale)) + zero, bounds)


def _clip(code, bounds):  # type: ignore[no-untyped-def]
    low, high = bounds
    return T.max(T.min(code, T.float32(high)), T.float32(low))


def _square(value, scale, zero, spec):  # type: ignore[no-untyped-def]
    level = T.Cast("float64", _code(value, scale, zero, code_range(spec)) - zero)
    difference = T.Cast("float64", value) - level * T.Cast("float64", scale)
    rounded = T.Cast("float64", T.Cast("float32", difference))
    return rounded * rounded


def _ratio(ratios: np.ndarray, index):  # type: ignore[no-untyped-def]
    """ratios[index] for a loop variable, as a chain of selects that unrolling folds away."""
    value = T.float32(ratios[0])
    for i in range(1, len(ratios)):
        value = tirx.Select(index == i, T.float32(ratios[i]), value)
    return value
