"""Products of INT8 or INT4 activations and INT4 weights (W4A8, W4A4): what is computed, without any
tiling.

Activations are quantized when the kernel runs, each token (row) in parts h of up to 128 columns,
which are whole groups g of the weight (a wider group is a part): with amax the largest magnitude in
a part,

    scale = amax / 127,    code = round_half_even(x / scale),    -127 <= code <= 127

of INT8, and 7 for 127 of INT4; or the smallest power of two that is no less than that scale. One
scale for a whole token would do less: a single large channel, as trained transformers have,
takes the resolution from all others. The product of two codes and the sum over a group are
integers, exact in int32; each group is scaled by the weight and each part by the activations once,
in float32:

    y[i, j] = sum over parts h of scale_x[i, h] * sum over groups g in h of scale_w[j, g] *
              (sum over k in g of code_w[j, k] * code_x[i, k]  -  zero_w[j, g] * sum_x[i, g])

where sum_x[i, g] is the sum of the activation codes in a group. Codes travel four to an int32 word.
Byte c of word w holds k = 8 (w / 2) + 2 c + w % 2: the order in which the even and the odd nibbles
of a word of INT4 codes (see `packing`) come out of a mask.

Codes of INT4 travel so, too, but where weights are packed in "fragments": there byte c of word w
holds k in its low nibble, in two's complement, and k + 32 in its high one, where
k = 64 (w / 8) + 8 (w % 8 / 2) + 2 c + w % 2. They are the columns whose codes of the weight share a
byte, and rows end with whole units of 64 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from ..int4_format.activation_format import (
    BYTES_PER_WORD,
    UNIT,
    ActivationFormat,
    magnitude,
    scale_columns,
)
from ..int4_format.packed_layout import PackedLayout
from .int4_matmul import (
    Rows,
    cast,
    int64,
    prim_func,
    row_axes,
    weight_code,
    weight_placeholders,
    zero_point,
)

QUANTIZE_ACTIVATION = "quantize_activation"
"""Annotation of the block of codes, whose value is the group size."""
INT8_DOT = "int8_dot"
"""Annotation of the block of integer sums, whose value is the group size."""
PACKED = "packed_activations"
"""And its annotation where two codes of activations share a byte."""
INT8 = ActivationFormat()


def quantize_activation(
    m: Rows, k: int, group_size: int, dtype: str, form: ActivationFormat = INT8
) -> tirx.PrimFunc:
    """INT8 or INT4 codes of activations.

    Parameters
    ----------
    m : int, None or a tuple of these
        Rows, or the axes of rows; None makes one symbolic.
    k, group_size : int
        Columns, and how many of them share a scale of the weight that they will meet.
    dtype : str
        Of X, a float type.
    form : ActivationFormat
        Of the codes.

    Returns
    -------
    PrimFunc
        Of X (m…, k) and the outputs codes int32 (m…, `form.words`: G g / 4), scale float32
        (m…, G g / s) and sums int32 (m…, G), where G = ceil(k / g) groups and s is `scale_columns`;
        codes beyond k are 0.
        Columns that are not finite get the scale NaN or infinity, so that no product with it is
        finite.
    """
    rows, depth = row_axes(m), int64(k)
    groups, columns = -(-k // group_size), scale_columns(k, group_size)
    parts = groups * group_size // columns
    x = te.placeholder((*rows, depth), dtype, name="X")
    r = te.reduce_axis((0, int64(columns)), name="k")

    def element(row: Sequence[tirx.Expr], column: tirx.Expr) -> tirx.Expr:
        value = _float(x[(*row, tirx.min(column, depth - 1))])
        return tirx.Select(column < depth, value, tirx.const(0, "float32"))

    largest = te.compute(
        (*rows, int64(parts)),
        lambda *at: te.max(magnitude(element(at[:-1], at[-1] * columns + r)), axis=r),
        name="largest",
    )
    scale = te.compute(largest.shape, lambda *at: form.scale(largest[at]), name="scale")

    def code(row: Sequence[tirx.Expr], column: tirx.Expr) -> tirx.Expr:
        part = column // columns
        if form.packed:  # whose units may end behind the last part
            part = tirx.min(part, int64(parts - 1))
        return form.code(element(row, column), scale[(*row, part)])

    def word(*at: tirx.Expr) -> tirx.Expr:
        *row, w = at
        total = tirx.const(0, "int32")
        for c in range(BYTES_PER_WORD):
            if form.packed:
                for half in range(2):
                    column = w // 8 * UNIT + half * (UNIT // 2) + w % 8 // 2 * 8 + 2 * c + w % 2
                    total = total | (code(row, column) & 15) << (8 * c + 4 * half)
            else:
                total = total | (code(row, w // 2 * 8 + 2 * c + w % 2) & 255) << (8 * c)
        return total

    words = te.compute(
        (*rows, int64(form.words(groups * group_size))),
        word,
        name="codes",
        attrs={QUANTIZE_ACTIVATION: group_size, **form.annotations},
    )
    t = te.reduce_axis((0, int64(group_size)), name="k")
    sums = te.compute(
        (*rows, int64(groups)),
        lambda *at: te.sum(code(at[:-1], at[-1] * group_size + t), axis=t),
        name="sums",
    )
    return prim_func([x], words, scale, sums)


def int8_matmul(m: Rows, layout: PackedLayout, dtype: str) -> tirx.PrimFunc:
    """``Y = X @ W.T`` of quantized activations X and a packed weight W (n, k).

    Parameters
    ----------
    m : int, None or a tuple of these
        Rows of X, or its axes of rows; None makes one symbolic.
    layout : PackedLayout
        Of the weight.
    dtype : str
        Of Y, a float type.

    Returns
    -------
    PrimFunc
        Of codes, scale and sums of X as `quantize_activation` gives them, the parts of W, and the
        output Y (m…, n), which is rounded to `dtype` once.
    """
    rows, n, group_size = row_axes(m), int64(layout.n), layout.group_size
    form = ActivationFormat.of(layout)
    x = te.placeholder((*rows, int64(form.words(layout.padded_k))), "int32", name="X")
    together = scale_columns(layout.k, group_size) // group_size
    x_scale = te.placeholder((*rows, int64(layout.groups // together)), "float32", name="X_scale")
    x_sums = te.placeholder((*rows, int64(layout.groups)), "int32", name="X_sums")
    packed = weight_placeholders(layout)

    def product(row: Sequence[tirx.Expr], j: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
        bit = (column % 8 // 2 * 8).astype("int32")
        if form.packed:
            word = x[(*row, column // UNIT * 8 + column % (UNIT // 2) // 8 * 2 + column % 2)]
            code = word << (28 - bit - (column % UNIT // (UNIT // 2) * 4).astype("int32")) >> 28
        else:
            code = x[(*row, column // 8 * 2 + column % 2)] << (24 - bit) >> 24
        return weight_code(packed, layout, j, column) * code

    r = te.reduce_axis((0, int64(group_size)), name="k")
    dot = te.compute(
        (*rows, n, int64(layout.groups)),
        lambda *at: te.sum(product(at[:-2], at[-2], at[-1] * group_size + r), axis=r),
        name=INT8_DOT,
        attrs={INT8_DOT: group_size, **({PACKED: 1} if form.packed else {})},
    )

    def scaled(row: Sequence[tirx.Expr], j: tirx.Expr, g: tirx.Expr) -> tirx.Expr:
        tile, lane = layout.lane_at(j)
        zero = zero_point(packed, layout, j, g)
        scale = _float(packed[1][tile, g, lane]) * x_scale[(*row, g // together)]
        return _float(dot[(*row, j, g)] - zero * x_sums[(*row, g)]) * scale

    s = te.reduce_axis((0, int64(layout.groups)), name="g")
    y = te.compute(
        (*rows, n), lambda *at: te.sum(scaled(at[:-1], at[-1], s), axis=s), name="matmul"
    )
    return prim_func([x, x_scale, x_sums, *packed], cast(y, dtype))


def _float(value: tirx.Expr) -> tirx.Expr:
    return value.astype("float32")
