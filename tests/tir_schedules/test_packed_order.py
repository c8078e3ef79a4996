"""The order "fragments" against the fragment tables of the PTX ISA, written here on their own."""

import itertools

import numpy as np
import pytest

from sits_tvm import QuantSpec, parse_target
from tir_schedules import weight_order
from tir_schedules.int4_format.packed_layout import PackedLayout
from tir_schedules.int4_format.packed_order import ORDERS, unit_of
from tir_schedules.int4_format.packing import pack

G32 = QuantSpec(group_size=32)
LANES, CHANNELS, COLUMNS = range(32), 16, 64


def m16n8k16_half(lane, register, half):
    """PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": row, column of A."""
    i = 2 * register + half  # a_i: two to a register, the lower half first
    group_id, thread_id_in_group = lane >> 2, lane % 4
    row = group_id if 0 <= i < 2 or 4 <= i < 6 else group_id + 8
    column = thread_id_in_group * 2 + (i & 1)
    return row, column if i < 4 else column + 8


def m16n8k32_byte(lane, register, byte):
    """PTX ISA, "Matrix Fragments for mma.m16n8k32" with .s8: row, column of A."""
    i = 4 * register + byte
    group_id, thread_id_in_group = lane >> 2, lane % 4
    row = group_id if 0 <= i < 4 or 8 <= i < 12 else group_id + 8
    column = thread_id_in_group * 4 + (i & 3)
    return row, column if i < 8 else column + 16


def column_of_byte(position):
    """Byte c of word w of INT8 activations holds k = 8 (w / 2) + 2 c + w % 2, see `int8_matmul`."""
    word, byte = divmod(position, 4)
    return 8 * (word // 2) + 2 * byte + word % 2


@pytest.fixture
def codes(rng):
    """Codes 1…15 of a unit, each group reaching the largest."""
    values = rng.integers(1, 16, (CHANNELS, COLUMNS))
    values[:, ::32] = 15
    return values


def packed_unit(codes, activation=None):
    """The words of a unit of these codes: weights -7…7 at scale 1."""
    spec = QuantSpec(group_size=32, activation=activation)
    words, scale = pack(codes.astype("float32") - 8, spec, "fragments")
    assert (scale == 1).all()
    assert words.shape == (1, 1, 128)
    return words[0, 0]


@pytest.mark.parametrize("activation", [None, "bfloat16"])
def test_a_word_is_the_operand_of_a_float_mma(codes, activation):
    """Word j of a lane, shifted right by 4 i: register i of k-step j, in the low bits of halves."""
    words = packed_unit(codes, activation)
    for lane, step, register, half in itertools.product(LANES, range(4), range(4), range(2)):
        row, column = m16n8k16_half(lane, register, half)
        shifted = int(words[4 * lane + step]) >> 4 * register
        assert shifted >> 16 * half & 15 == codes[row, 16 * step + column]


def m16n8k64_nibble(lane, register, nibble):
    """PTX ISA, "Matrix Fragments for mma.m16n8k64" with .s4: row, column of A."""
    i = 8 * register + nibble
    group_id, thread_id_in_group = lane >> 2, lane % 4
    row = group_id if 0 <= i < 8 or 16 <= i < 24 else group_id + 8
    column = thread_id_in_group * 8 + (i & 7)
    return row, column if i < 16 else column + 32


def column_of_nibble(position):
    """Packed INT4 activations: byte c of word w has k in its low half, and k + 32."""
    word, nibble = divmod(position, 8)
    byte, is_high = divmod(nibble, 2)
    return 8 * (word // 2) + 2 * byte + word % 2 + 32 * is_high


def test_a_word_is_a_register_of_an_int4_mma(codes):
    """Word i of a lane: register i, columns in the order of the nibbles of packed activations."""
    words = packed_unit(codes, "int4")
    for lane, register, nibble in itertools.product(LANES, range(4), range(8)):
        row, position = m16n8k64_nibble(lane, register, nibble)
        assert (
            int(words[4 * lane + register]) >> 4 * nibble & 15
            == codes[row, column_of_nibble(position)]
        )


def test_a_word_is_a_register_of_two_int8_mmas(codes):
    """Low nibbles of a lane's word i: register i of the first k-step; high ones: of the second."""
    words = packed_unit(codes, "int8")
    for lane, step, register, byte in itertools.product(LANES, range(2), range(4), range(4)):
        row, position = m16n8k32_byte(lane, register, byte)
        shifted = int(words[4 * lane + register]) >> 4 * step
        assert shifted >> 8 * byte & 15 == codes[row, column_of_byte(32 * step + position)]


@pytest.mark.parametrize("activation", [None, "int8"])
def test_a_lane_reads_the_scales_of_its_two_rows_as_one_word(rng, activation):
    """Rows lane / 4 and lane / 4 + 8, as the tables have them; their zero points share a byte."""
    spec = QuantSpec(group_size=32, symmetric=False, activation=activation)
    weight = rng.standard_normal((40, 96)).astype("float32")
    _, scale, zero = pack(weight, spec, "fragments")
    _, by_row, zero_by_row = pack(weight, spec, "rows")
    for tile, lane, group in itertools.product(range(3), LANES, range(3)):
        pair = scale[tile, group].view("uint32")[lane // 4 : lane // 4 + 1].view("float16")
        for half, row in enumerate((16 * tile + lane // 4, 16 * tile + lane // 4 + 8)):
            if row < 40:
                assert pair[half] == by_row[row, group, 0]
                zeros = zero[tile, 0, lane // 4] >> (8 * group + 4 * half) & 15
                assert zeros == zero_by_row[row, 0, 0] >> (4 * group) & 15


@pytest.mark.parametrize(("symmetric", "padding"), [(True, 0x88888888), (False, 0)])
@pytest.mark.parametrize("activation", [None, "int8"])
def test_units_beyond_the_weight_are_padding(rng, symmetric, padding, activation):
    """72 columns in groups of 32 are 96, of 128 in whole units; 17 channels are 2 tiles."""
    spec = QuantSpec(group_size=32, symmetric=symmetric, activation=activation)
    layout = PackedLayout(17, 72, spec, "fragments")
    codes, scale, *_ = pack(rng.uniform(1, 2, (17, 72)).astype("float32"), spec, "fragments")
    assert layout.shapes[:2] == ((2, 2, 128), (2, 3, 16))
    used = np.zeros((2, 2, 128), "uint32")
    for row, column in itertools.product(range(17), range(96)):
        indices, nibble = layout.code_at(row, column)
        used[indices] |= np.uint32(15 << 4 * nibble)
    assert used.any()
    np.testing.assert_array_equal(codes & ~used, np.uint32(padding) & ~used)
    assert (scale[1, :, 1:] == 1).all()


@pytest.mark.parametrize("activation", [None, "int8"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_code_has_a_place_of_its_own(order, activation):
    layout = PackedLayout(48, 128, QuantSpec(group_size=64, activation=activation), order)
    places = set()
    for row, column in itertools.product(range(48), range(128)):
        indices, nibble = layout.code_at(row, column)
        assert all(0 <= i < extent for i, extent in zip(indices, layout.shapes[0], strict=True))
        assert layout.origin(*indices, nibble) == (row, column)
        assert layout.row_at(*layout.lane_at(row)) == row
        places.add((*indices, nibble))
    assert len(places) == 48 * 128 == 8 * np.prod(layout.shapes[0])


def test_refuses_an_order_that_is_none():
    with pytest.raises(ValueError, match="order='lanes'; write one of 'rows', 'vectors', 'frag"):
        unit_of("lanes")


@pytest.mark.parametrize(
    ("target", "order"),
    [
        ("llvm", "vectors"),
        ("cuda -arch=sm_75", "rows"),
        ("cuda -arch=sm_80", "fragments"),
        ("cuda -arch=sm_90a", "fragments"),
        ("cuda -arch=sm_120", "fragments"),
    ],
)
def test_the_target_has_an_order(target, order):
    assert weight_order(parse_target(target)) == order
