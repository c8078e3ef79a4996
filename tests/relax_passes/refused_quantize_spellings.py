"""Spellings near quantization that are other functions, with the code of the finding."""

from quantize_forms import CHANNELS, SCALE, SCALES, const

from relax_passes.op import dequantize, quantize

INT8, FLOAT = ((), "int8"), ((), "float32")


def codes_of(b, x, s, lo=-8, hi=7):
    return b.clip(b.round(b.divide(x, s)), lo, hi)


def reciprocal_of_an_argument(b, x, s):
    return b.multiply(b.clip(b.round(b.multiply(x, b.divide(const(1.0), s))), -8, 7), s)


def reciprocal_of_a_constant(b, x):
    return b.multiply(b.clip(b.round(b.multiply(x, const(10.0))), -8, 7), const(0.1))


def floor_of_a_half_more(b, x, s):
    ratio = b.add(b.divide(x, s), const(0.5))
    return b.multiply(b.clip(b.floor(ratio), -8, 7), s)


def truncated(b, x, s):
    codes = b.astype(b.clip(b.divide(x, s), -8, 7), "int8")
    return b.multiply(b.astype(codes, "float32"), s)


def sum_is_rounded(b, x, s):
    codes = b.clip(b.round(b.add(b.divide(x, s), const(3.0))), 0, 15)
    return b.multiply(b.subtract(codes, const(3.0)), s)


def products_are_subtracted(b, x, s):
    codes = b.clip(b.add(b.round(b.divide(x, s)), const(3.0)), 0, 15)
    return b.subtract(b.multiply(codes, s), b.multiply(const(3.0), s))


def other_zero_point(b, x, s):
    codes = b.clip(b.add(b.round(b.divide(x, s)), const(3.0)), 0, 15)
    return b.multiply(b.subtract(codes, const(4.0)), s)


def other_scale(b, x, s, t):
    return b.multiply(codes_of(b, x, s), t)


def other_axis(b, x, s):
    """The same numbers, but along the rows going in and along the columns coming out."""
    square = b.strided_slice(x, [0], [0], [CHANNELS])
    codes = codes_of(b, square, b.expand_dims(s, 1))
    return b.multiply(codes, s)


def not_a_width(b, x, s):
    return b.multiply(codes_of(b, x, s, -5, 6), s)


def two_codes_short(b, x, s):
    return b.multiply(codes_of(b, x, s, -6, 7), s)


def half_a_code(b, x, s):
    return b.multiply(codes_of(b, x, s, -7.5, 7.5), s)


def no_upper_bound(b, x, s):
    return b.multiply(b.maximum(b.round(b.divide(x, s)), const(-8.0)), s)


def bounds_are_arguments(b, x, s, limit):
    return b.multiply(b.minimum(b.round(b.divide(x, s)), limit), s)


def cast_before_clip(b, x, s):
    codes = b.clip(b.astype(b.round(b.divide(x, s)), "int32"), -8, 7)
    return b.multiply(b.astype(codes, "float32"), s)


def zero_point_of_any_int8(b, x, s, z):
    codes = b.clip(b.add(b.round(b.divide(x, s)), b.astype(z, "float32")), -8, 7)
    return b.multiply(b.subtract(codes, b.astype(z, "float32")), s)


def zero_point_is_not_rounded(b, x, s, z):
    codes = b.clip(b.add(b.round(b.divide(x, s)), z), 0, 15)
    return b.multiply(b.subtract(codes, z), s)


def with_codes_of_zero_point(b, x, s, code, lo, hi):
    codes = b.clip(b.add(b.round(b.divide(x, s)), code), lo, hi)
    return b.multiply(b.subtract(codes, code), s)


def zero_point_wraps_to_uint8(b, x, s, z):
    return with_codes_of_zero_point(b, x, s, b.astype(b.astype(z, "uint8"), "float32"), -128, 127)


def zero_point_wraps_to_int8(b, x, s, z):
    code = b.astype(b.astype(b.clip(z, 0, 255), "int8"), "float32")
    return with_codes_of_zero_point(b, x, s, code, 0, 255)


def zero_point_has_less_room(b, x, s, z):
    code = b.clip(b.clip(b.round(z), 0, 15), 3, 20)
    return with_codes_of_zero_point(b, x, s, code, 0, 15)


def zero_point_in_int16(b, x, s, z):
    code = b.astype(b.clip(z, 0, 15), "float32")
    return with_codes_of_zero_point(b, x, s, code, 0, 15)


def wraps_around_in_uint32(b, x, s):
    zero = const(3, "uint32")
    codes = b.quantize(x, s, zero, axis=1, out_dtype="int8")
    return b.dequantize(codes, s, zero, axis=1, out_dtype="float32")


def clipped_before_and_after(b, x, s):
    codes = b.round(b.maximum(b.divide(x, s), const(-8.0)))
    return b.multiply(b.minimum(codes, const(7.0)), s)


def zero_point_out_of_range(b, x, s):
    codes = b.clip(b.add(b.round(b.divide(x, s)), const(20.0)), 0, 15)
    return b.multiply(b.subtract(codes, const(20.0)), s)


def scale_is_zero(b, x):
    return b.multiply(codes_of(b, x, const(0.0)), const(0.0))


def in_float16(b, x, s):
    x, s = b.astype(x, "float16"), b.astype(s, "float16")
    return b.multiply(codes_of(b, x, s), s)


def difference_wraps(b, x, s, z):
    codes = b.quantize(x, s, z, axis=1, out_dtype="int8")
    return b.multiply(b.astype(b.subtract(codes, z), "float32"), s)


def sum_wraps(b, x, s):
    codes = b.astype(b.clip(b.round(b.divide(x, s)), -128, 127), "int8")
    codes = b.clip(b.add(codes, const(5, "int8")), -8, 7)
    return b.multiply(b.astype(b.subtract(codes, const(5, "int8")), "float32"), s)


def codes_are_transposed(b, x, s):
    codes = b.permute_dims(b.astype(codes_of(b, x, s), "int8"))
    return b.multiply(b.astype(codes, "float32"), s)


def sixteen_bits(b, x, s):
    codes = b.quantize(x, s, const(0, "int16"), axis=1, out_dtype="int16")
    return b.dequantize(codes, s, const(0, "int16"), axis=1, out_dtype="float32")


def shared_over_two_axes(b, x, s):
    cube = b.reshape(x, (4, -1, 4, CHANNELS // 4))
    return b.multiply(codes_of(b, cube, s), s)


def pair_around(change):
    """dequantize(change(quantize(x)))."""

    def spell(b, x, s):
        return dequantize(change(b, b.bb.emit(quantize(x, s))), s)

    spell.__name__ = change.__name__
    return spell


@pair_around
def pair_transposed(b, codes):
    return b.permute_dims(codes)


@pair_around
def pair_reshaped(b, codes):
    return b.reshape(b.astype(codes, "int32"), (-1, 4))


@pair_around
def pair_clipped(b, codes):
    return b.clip(codes, -4, 3)


@pair_around
def pair_joined(b, codes):
    return b.concat([codes, b.maximum(const(-3, "int8"), codes)], axis=0)


@pair_around
def pair_clipped_in_float(b, codes):
    return b.astype(b.clip(b.astype(codes, "float32"), -4, 3), "int8")


# spelling, parameters after x, code, severity
REFUSED = [
    (reciprocal_of_an_argument, [SCALE], "reciprocal", "note"),
    (reciprocal_of_a_constant, [], "reciprocal", "note"),
    (floor_of_a_half_more, [SCALE], "other-rounding", "note"),
    (truncated, [SCALE], "other-rounding", "warning"),
    (sum_is_rounded, [SCALE], "zero-point-before-rounding", "note"),
    (products_are_subtracted, [SCALE], "zero-point-once", "note"),
    (other_zero_point, [SCALE], "two-zero-points", "note"),
    (other_scale, [SCALE, SCALE], "two-scales", "note"),
    (other_axis, [SCALES], "two-scales", "note"),
    (not_a_width, [SCALE], "range", "note"),
    (two_codes_short, [SCALE], "range", "note"),
    (half_a_code, [SCALE], "range-not-integer", "note"),
    (no_upper_bound, [SCALE], "range", "note"),
    (bounds_are_arguments, [SCALE, FLOAT], "range-not-constant", "note"),
    (cast_before_clip, [SCALE], "cast-before-clip", "warning"),
    (zero_point_of_any_int8, [SCALE, INT8], "zero-point-range", "note"),
    (zero_point_is_not_rounded, [SCALE, FLOAT], "zero-point-range", "note"),
    (zero_point_wraps_to_uint8, [SCALE, INT8], "zero-point-range", "note"),
    (zero_point_wraps_to_int8, [SCALE, ((), "int32")], "zero-point-range", "note"),
    (zero_point_wraps_to_int8, [SCALE, FLOAT], "zero-point-range", "note"),
    (zero_point_has_less_room, [SCALE, FLOAT], "zero-point-range", "note"),
    (zero_point_in_int16, [SCALE, ((), "int16")], "zero-point-dtype", "note"),
    (wraps_around_in_uint32, [SCALES], "difference-wraps", "note"),
    (clipped_before_and_after, [SCALE], "two-clip-masks", "note"),
    (zero_point_out_of_range, [SCALE], "zero-point-range", "note"),
    (scale_is_zero, [], "scale-not-positive", "note"),
    (in_float16, [SCALE], "not-float32", "note"),
    (difference_wraps, [SCALE, INT8], "difference-wraps", "note"),
    (sum_wraps, [SCALE], "sum-wraps", "warning"),
    (codes_are_transposed, [SCALE], "codes-moved", "warning"),
    *(
        (spell, [SCALE], "codes-changed", "note")
        for spell in (pair_transposed, pair_reshaped, pair_clipped, pair_joined)
    ),
    (pair_clipped_in_float, [SCALE], "codes-changed", "warning"),
    (sixteen_bits, [SCALES], "range", "note"),
    (shared_over_two_axes, [((4, 1, 4, 1), "float32")], "granularity", "note"),
]
