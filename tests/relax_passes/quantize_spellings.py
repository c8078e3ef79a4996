"""Spellings that FixQuantizeGradient takes, with the attributes that they ask for."""

from quantize_forms import CHANNELS, ROWS, SCALE, SCALES, const

from relax_passes.op import dequantize, quantize

ROW_SCALES = ((ROWS, 1), "float32")
ZERO = {dtype: ((), dtype) for dtype in ("int8", "float32")}
GROUP = 4
GROUP_SCALES = ((ROWS, CHANNELS // GROUP), "float32")
LIST_OF_SCALES = ((ROWS * CHANNELS // GROUP,), "float32")


def plain(b, x, s):
    return b.multiply(b.clip(b.round(b.divide(x, s)), -8, 7), s)


def commuted(b, x, s):
    return b.multiply(s, b.clip(b.round(b.divide(x, s)), -8, 7))


def min_max(b, x, s):
    codes = b.maximum(const(-8.0), b.minimum(b.round(b.divide(x, s)), const(7.0)))
    return b.multiply(codes, s)


def clip_first(b, x, s):
    return b.multiply(b.round(b.clip(b.divide(x, s), -8, 7)), s)


def clipped_twice(b, x, s):
    codes = b.astype(b.clip(b.round(b.divide(x, s)), -128, 127), "int8")
    return b.multiply(b.astype(b.clip(codes, -8, 7), "float32"), s)


def integer_round_trip(b, x, s):
    codes = b.astype(b.clip(b.round(b.divide(x, s)), -8, 7), "int8")
    return b.multiply(b.astype(b.astype(codes, "int32"), "float32"), s)


def constant_zero_point(b, x, s):
    codes = b.clip(b.add(b.round(b.divide(x, s)), const(3.0)), 0, 15)
    return b.multiply(b.subtract(codes, const(3.0)), s)


def integer_zero_point(b, x, s, z):
    codes = b.clip(b.add(b.round(b.divide(x, s)), b.astype(z, "float32")), -128, 127)
    difference = b.subtract(b.astype(b.astype(codes, "int8"), "int32"), b.astype(z, "int32"))
    return b.multiply(b.astype(difference, "float32"), s)


def learned_zero_point(b, x, s, z):
    code = b.round(b.clip(z, 0, 15))
    codes = b.clip(b.add(b.round(b.divide(x, s)), code), 0, 15)
    return b.multiply(b.subtract(codes, code), s)


def half_zero_point(b, x, s, z):
    """The zero point is rounded to float16 first: 2.5004 to 2.5, and that to 2."""
    code = b.clip(b.round(b.astype(b.astype(z, "float16"), "float32")), 0, 15)
    codes = b.clip(b.add(b.round(b.divide(x, s)), code), 0, 15)
    return b.multiply(b.subtract(codes, code), s)


def stretched_zero_point(b, x, s, z):
    code = b.astype(b.broadcast_to(z, (CHANNELS,)), "float32")
    codes = b.clip(b.add(b.round(b.divide(x, s)), code), -128, 127)
    return b.multiply(b.subtract(codes, code), s)


def clipped_wide_first(b, x, s):
    codes = b.round(b.clip(b.divide(x, s), -128, 127))
    return b.multiply(b.clip(codes, -8, 7), s)


def reciprocal(b, x):
    scale = const(0.125)
    return b.multiply(b.clip(b.round(b.multiply(x, b.divide(const(1.0), scale))), -8, 7), scale)


def multiplied_back_and_forth(b, x):
    return b.divide(b.clip(b.round(b.multiply(const(8.0), x)), -8, 7), const(8.0))


def quantize_dequantize(b, x, s):
    codes = b.quantize(x, s, const(3, "int8"), axis=1, out_dtype="int8")
    return b.dequantize(codes, s, const(3, "int8"), axis=1, out_dtype="float32")


def short_zero_point(b, x, s):
    """TVM takes a zero point in int16, the op does not."""
    codes = b.quantize(x, s, const(3, "int16"), axis=1, out_dtype="int8")
    return b.dequantize(codes, s, const(3, "int16"), axis=1, out_dtype="float32")


def narrowed(b, x, s):
    codes = b.clip(b.quantize(x, s, const(2, "int8"), axis=-1, out_dtype="int8"), -7, 7)
    return b.dequantize(codes, s, const(2, "int8"), axis=-1, out_dtype="float32")


def quantize_by_hand(b, x, s, z):
    codes = b.quantize(x, s, z, axis=1, out_dtype="uint8")
    return b.multiply(b.subtract(b.astype(codes, "float32"), b.astype(z, "float32")), s)


def per_row(b, x, s):
    return plain(b, x, b.broadcast_to(s, (ROWS, CHANNELS)))


def grouped(b, x, s):
    groups = b.reshape(x, (ROWS, CHANNELS // GROUP, GROUP))
    wide = b.expand_dims(s, 2)
    return b.reshape(plain(b, groups, wide), (ROWS, CHANNELS))


def grouped_in_rows(b, x, s):
    rows = b.reshape(x, (ROWS * CHANNELS // GROUP, GROUP))
    return b.reshape(plain(b, rows, b.reshape(s, (-1, 1))), (ROWS, CHANNELS))


def repeated(b, x, s):
    return plain(b, x, b.repeat(s, GROUP, 1))


def expanded(b, x, s):
    wide = b.broadcast_to(b.expand_dims(s, 2), (ROWS, CHANNELS // GROUP, GROUP))
    return plain(b, x, b.reshape(wide, (ROWS, CHANNELS)))


def repeated_for_a_batch(b, x, s):
    batch = plain(b, b.reshape(x, (1, ROWS, CHANNELS)), b.repeat(s, GROUP, 1))
    return b.reshape(batch, (ROWS, CHANNELS))


def expanded_from_a_list(b, x, s):
    return expanded(b, x, b.reshape(s, (ROWS, CHANNELS // GROUP)))


def expanded_to_one_group(b, x, s):
    wide = b.broadcast_to(b.reshape(s, (ROWS, 1, 1)), (ROWS, 1, CHANNELS))
    return plain(b, x, b.reshape(wide, (ROWS, CHANNELS)))


def our_pair(b, x, s):
    form = {"bits": 3, "axis": 1, "signed": False}
    return dequantize(b.bb.emit(quantize(x, s, **form)), s, **form)


INT4 = {"bits": 4, "signed": True}
CHANNEL = {"axis": 1, "group_size": None}
PER_GROUP = {"axis": 1, "group_size": GROUP}
# name: (spelling, parameters after x, attributes that are expected)
FORMS = {
    "plain": (plain, [SCALE], INT4),
    "commuted": (commuted, [SCALE], INT4),
    "per_channel": (plain, [SCALES], {**INT4, **CHANNEL}),
    "min_max": (min_max, [SCALES], {**INT4, **CHANNEL}),
    "clip_first": (clip_first, [SCALES], {**INT4, **CHANNEL, "clip_mask": "strict"}),
    "clipped_twice": (clipped_twice, [SCALE], INT4),
    "integer_round_trip": (integer_round_trip, [SCALES], {**INT4, **CHANNEL}),
    "constant_zero_point": (constant_zero_point, [SCALES], {"bits": 4, "signed": False}),
    "integer_zero_point": (integer_zero_point, [SCALES, ZERO["int8"]], {"bits": 8}),
    "learned_zero_point": (learned_zero_point, [SCALES, ZERO["float32"]], {"signed": False}),
    "half_zero_point": (half_zero_point, [SCALES, ZERO["float32"]], {"signed": False}),
    "stretched_zero_point": (stretched_zero_point, [SCALES, ZERO["int8"]], {"bits": 8}),
    "clipped_wide_first": (clipped_wide_first, [SCALES], {**INT4, "clip_mask": "rounded"}),
    "short_zero_point": (short_zero_point, [SCALES], {"bits": 8, "signed": True, **CHANNEL}),
    "reciprocal": (reciprocal, [], INT4),
    "multiplied_back_and_forth": (multiplied_back_and_forth, [], INT4),
    "quantize_dequantize": (quantize_dequantize, [SCALES], {"bits": 8, "signed": True, **CHANNEL}),
    "narrowed": (narrowed, [SCALES], {**INT4, "narrow_range": True}),
    "quantize_by_hand": (quantize_by_hand, [SCALES, ((), "uint8")], {"bits": 8, "signed": False}),
    "per_row": (per_row, [ROW_SCALES], {**INT4, "axis": 0}),
    "grouped": (grouped, [GROUP_SCALES], {**INT4, **PER_GROUP}),
    "grouped_in_rows": (grouped_in_rows, [GROUP_SCALES], {**INT4, **PER_GROUP}),
    "repeated": (repeated, [GROUP_SCALES], {**INT4, **PER_GROUP}),
    "expanded": (expanded, [GROUP_SCALES], {**INT4, **PER_GROUP}),
    "repeated_for_a_batch": (repeated_for_a_batch, [GROUP_SCALES], {**PER_GROUP, "axis": 2}),
    "expanded_from_a_list": (expanded_from_a_list, [LIST_OF_SCALES], {**INT4, **PER_GROUP}),
    "expanded_to_one_group": (expanded_to_one_group, [((ROWS,), "float32")], {"group_size": 8}),
    "our_pair": (our_pair, [SCALES], {"bits": 3, "signed": False, **CHANNEL}),
}
