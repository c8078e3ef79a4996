"""Each instruction on registers in cuda_host_ptx.h, against the tables of the PTX ISA in NumPy."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from cuda_instruction import Instruction
from cuda_text import GlobalArray, Kernels

BF16 = np.dtype(ml_dtypes.bfloat16)


def _mma(shape, accumulator, *types):
    kind = "f32" if accumulator == "f" else "s32"
    mnemonic = f"mma.sync.aligned.{shape}.row.col.{kind}.{'.'.join(types)}.{kind}"
    registers = "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}"
    template = f"{mnemonic} {registers};"
    name = f"mma_{'_'.join(types)}"
    return Instruction(name, template, accumulator * 4, "rrrr", "rr", accumulator * 4)


MMA = {
    "f16": (_mma("m16n8k16", "f", "f16", "f16"), np.dtype("float16"), np.dtype("float16")),
    "bf16": (_mma("m16n8k16", "f", "bf16", "bf16"), BF16, BF16),
    "s8": (_mma("m16n8k32", "r", "s8", "s8"), np.dtype("int8"), np.dtype("int8")),
    "u8 s8": (_mma("m16n8k32", "r", "u8", "s8"), np.dtype("uint8"), np.dtype("int8")),
    "s4": (_mma("m16n8k64", "r", "s4", "s4"), "s4", "s4"),
    "u4 s4": (_mma("m16n8k64", "r", "u4", "s4"), "u4", "s4"),
}
PAIRS = {"f16": np.dtype("float16"), "bf16": BF16}
ARITHMETIC = {
    f"{name}_{kind}": Instruction(f"{name}_{kind}", f"{name}.{kind}x2 %0, %1, %2;", "r", "r", "r")
    for name in ("add", "sub", "mul")
    for kind in PAIRS
}
FMA = {
    kind: Instruction(f"fma_{kind}", f"fma.rn.{kind}x2 %0, %1, %2, %3;", "r", "r", "r", "r")
    for kind in PAIRS
}
CONVERT = {
    kind: Instruction(f"cvt_{kind}", f"cvt.rn.{kind}x2.f32 %0, %1, %2;", "r", "f", "f")
    for kind in PAIRS
}
PRMT = Instruction("prmt", "prmt.b32 %0, %1, %2, %3;", "r", "r", "r", "r")
EX2 = Instruction("ex2", "ex2.approx.ftz.f32 %0, %1;", "f", "f")
RCP = Instruction("rcp", "rcp.approx.ftz.f32 %0, %1;", "f", "f")
DP4A = Instruction("dp4a", "dp4a.s32.s32 %0, %1, %2, %3;", "r", "r", "r", "r")
LOP3 = Instruction(
    "lop3",
    " ".join(f"lop3.b32 %{table}, %256, %257, %258, {hex(table)};" for table in range(256)),
    "r" * 256,
    "r",
    "r",
    "r",
)


@pytest.fixture(scope="module")
def library():
    several = [one for one, *_ in MMA.values()]
    several += [*ARITHMETIC.values(), *FMA.values(), *CONVERT.values(), PRMT, EX2, RCP, DP4A, LOP3]
    texts = [one.text() for one in several]
    return Kernels("".join(texts + [_shuffle_text(kind) for kind in ("", "xor_", "down_", "up_")]))


def test_lop3_looks_up_every_bit_in_its_table(library, rng):
    words = rng.integers(0, 2**32, (3, 32), "uint32")
    a, b, c = (_bits(x) for x in words)
    found = LOP3.run(library, *words)
    for table in range(256):
        np.testing.assert_array_equal(_bits(found[:, table]), table >> (4 * a + 2 * b + c) & 1)


def _bits(words):
    return np.unpackbits(np.ascontiguousarray(words).view("uint8"))


def test_prmt_picks_bytes_and_signs(library, rng):
    a, b, selectors = rng.integers(0, 2**32, (3, 3200), "uint32")
    found = PRMT.run(library, a, b, selectors).reshape(-1)
    for x, y, selector, result in zip(a, b, selectors, found, strict=True):
        pool = [*int(x).to_bytes(4, "little"), *int(y).to_bytes(4, "little")]
        picks = [int(selector) >> shift & 15 for shift in (0, 4, 8, 12)]
        signs = [255 if pool[pick & 7] >= 128 else 0 for pick in picks]
        parts = [s if p > 7 else pool[p] for p, s in zip(picks, signs, strict=True)]
        assert int(result) == int.from_bytes(bytes(parts), "little")


# Pairs of float16 or bfloat16


def _special(kind):
    """Bit patterns at every edge: zeros, subnormals, near 1, the largest, Inf, NaN.

    And two whose product is between two numbers: what is added decides, however little.
    """
    top = 0x7C00 if kind == "f16" else 0x7F80
    one = 0x3C00 if kind == "f16" else 0x3F80
    tie = [0x4200, 0x6156] if kind == "f16" else [0x4110, 0x41E8]  # 3 and 683, 9 and 29
    middle = [one - 1, one, one + 1, one + 2, 0x6405, 0x5480, 0x1234, 0x2E66, *tie]
    positive = np.array([0, 1, 2, 0x7F, 0x81, *middle, top - 1, top, top + 1], "uint16")
    return np.concatenate([positive, positive | 0x8000])


def _grid(kind, operands):
    """All combinations of special values in low halves, in another order in high ones, by word."""
    values = _special(kind)
    grid = np.stack(np.meshgrid(*[values] * operands)).reshape(operands, -1)
    grid = grid[:, : grid.shape[1] // 32 * 32]
    return grid, grid.astype("uint32") | np.roll(grid, 7, 1).astype("uint32") << 16


def _assert_pairs(found, expected):
    """`expected`: of low halves, in the dtype."""
    words = found.reshape(-1)
    for half in (0, 16):
        values = (words >> half & 0xFFFF).astype("uint16").view(expected.dtype)
        wanted = np.roll(expected, 7) if half else expected
        nan = np.isnan(wanted.astype("float32"))
        np.testing.assert_array_equal(np.isnan(values.astype("float32")), nan)
        np.testing.assert_array_equal(values.view("uint16")[~nan], wanted.view("uint16")[~nan])


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_of_pairs_rounds_once(name, library):
    operation, kind = name.split("_")
    values, words = _grid(kind, 2)
    left, right = values.view(PAIRS[kind])
    ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation]
    with np.errstate(all="ignore"):
        expected = ufunc(left, right)
    _assert_pairs(ARITHMETIC[name].run(library, *words), expected)


def _rounded(exact, dtype):
    """The nearest number of the dtype, ties to even, of a Fraction."""
    info = ml_dtypes.finfo(dtype)
    exponent = max(math.frexp(exact)[1] - 1, info.minexp) - info.nmant
    nearest = round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent  # ties to even
    inside = abs(nearest) <= Fraction(float(info.max))
    return math.copysign(nearest if inside else math.inf, exact)


@pytest.mark.parametrize("kind", PAIRS)
def test_fma_of_pairs_rounds_once(kind, library):
    values, words = _grid(kind, 3)
    found = FMA[kind].run(library, *words).reshape(-1)
    with np.errstate(all="ignore"):
        a, b, c = (x.astype("float64") for x in values.view(PAIRS[kind]))
        expected = a * b + c
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    for i in np.flatnonzero(finite & (expected != 0)):
        exact = Fraction(a[i]) * Fraction(b[i]) + Fraction(c[i])
        expected[i] = _rounded(exact, PAIRS[kind])
    with np.errstate(all="ignore"):
        _assert_pairs(found, expected.astype(PAIRS[kind]))


@pytest.mark.parametrize("kind", PAIRS)
def test_conversion_rounds_to_even_with_the_first_operand_above(kind, library, rng):
    bits = rng.integers(0, 2**32, 6400, "uint32")
    bits[:3200] &= 0xFFFFF000  # ties, too
    bits[1:3200:3] |= 1
    upper, lower = bits.view("float32").reshape(2, 3200)
    words = CONVERT[kind].run(library, upper, lower).reshape(-1)
    for shift, values in ((16, upper), (0, lower)):
        found = (words >> shift & 0xFFFF).astype("uint16").view(PAIRS[kind])
        with np.errstate(all="ignore"):
            expected = values.astype(PAIRS[kind]).astype("float32")
            np.testing.assert_array_equal(found.astype("float32"), expected)


def test_rcp_is_one_unit_off_at_most(library):
    values = np.geomspace(2.0**-125, 2.0**125, 320, dtype="float32").reshape(32, 10)
    found = np.concatenate([RCP.run(library, values[:, i]) for i in range(10)], -1)
    off = np.abs(found.astype("float64") * values - 1)
    assert 2.0**-25 < off.max() <= 2.0**-22
    special = np.resize(np.array([np.inf, 2.0**127, -(2.0**-130), np.nan], "float32"), 32)
    expected = np.resize(np.array([0, 0, -np.inf, np.nan], "float32"), 32)
    np.testing.assert_array_equal(RCP.run(library, special).reshape(-1), expected)


def test_dp4a_adds_products_of_signed_bytes(library, rng):
    a, b, c = rng.integers(-(2**31), 2**31, (3, 32)).astype("int32")
    products = a.view("int8").astype("int64") * b.view("int8")
    expected = (c + products.reshape(32, 4).sum(-1)).astype("int32")
    found = DP4A.run(library, a, b, c).view("int32").reshape(-1)
    np.testing.assert_array_equal(found, expected)


def test_ex2_is_a_power_of_two(library):
    powers = np.linspace(-120, 120, 3200, dtype="float32")
    found = EX2.run(library, powers).reshape(-1)
    np.testing.assert_allclose(found, 2.0 ** powers.astype("float64"), rtol=2.0**-22)


# Shuffles: width and distance, or lane, of each

SHUFFLES = [(width, by) for width in (2, 4, 16, 32) for by in (0, 1, 3, 5, 9, 21)]
_SHUFFLE = """
extern "C" __global__ void shuffle_{0}(int* out) {{
  for (int i = 0; i < {1}; ++i) {{
    const int widths[] = {{{2}}}, distances[] = {{{3}}};
    out[32 * i + threadIdx.x] =
        __shfl_{0}sync(0xFFFFFFFF, (int)threadIdx.x, distances[i], widths[i]);
  }}
}}
"""


def _shuffle_text(kind):
    widths, distances = (", ".join(map(str, x)) for x in zip(*SHUFFLES, strict=True))
    return _SHUFFLE.format(kind, len(SHUFFLES), widths, distances)


@pytest.mark.parametrize("kind", ["", "xor_", "down_", "up_"])
def test_shuffles_stay_in_their_groups(kind, library):
    out = GlobalArray("out", 128 * len(SHUFFLES))
    library.launch(f"shuffle_{kind}", [out], {"threadIdx.x": 32})
    own = np.arange(32)
    for (width, by), found in zip(SHUFFLES, out.bytes.view("int32").reshape(-1, 32), strict=True):
        fixed = 32 - width  # bits of the lane that name its group
        first, last = own & fixed, (own & fixed) | (31 & ~fixed)
        source, inside = {
            "": (first | (by & ~fixed), own >= 0),
            "xor_": (own ^ by, (own ^ by) <= last),
            "down_": (own + by, own + by <= last),
            "up_": (own - by, own - by >= first),
        }[kind]
        np.testing.assert_array_equal(found, np.where(inside, source, own))


# Tensor cores: rows and columns of element i of a fragment, as the ISA tables have them


def _fragments(elements):
    """Rows and columns of A and B for all lanes; `elements` to a register."""
    e, lane = elements, np.arange(32)[:, None]
    group, thread = lane >> 2, lane % 4
    i = np.arange(4 * e)
    upper = (i < e) | ((2 * e <= i) & (i < 3 * e))
    a_row = np.where(upper, group, group + 8)
    a_column = thread * e + (i & (e - 1)) + np.where(i < 2 * e, 0, 4 * e)
    i = np.arange(2 * e)
    b_row = thread * e + (i & (e - 1)) + np.where(i < e, 0, 4 * e)
    return (a_row, a_column), (b_row, group + 0 * i)


def _accumulator():
    lane, i = np.arange(32)[:, None], np.arange(4)
    return np.where(i < 2, lane >> 2, (lane >> 2) + 8), lane % 4 * 2 + (i & 1)


def _draw(rng, kind, shape):
    """Codes to put into registers, and the numbers that they are."""
    if kind in ("s4", "u4"):
        codes = rng.integers(0, 16, shape, "uint8")
        return codes, (codes.astype("int64") ^ 8) - 8 if kind == "s4" else codes.astype("int64")
    if kind.kind in "iu":
        numbers = rng.integers(0, 256, shape, "uint8").view(kind)
        return numbers, numbers.astype("int64")
    numbers = (rng.integers(-64, 64, shape) / 8).astype(kind)
    return numbers, numbers.astype("float64")


def _packed(codes, is_nibbles):
    """The registers of each lane, the first element lowest."""
    if is_nibbles:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return np.ascontiguousarray(codes).view("uint32")


@pytest.mark.parametrize("name", MMA)
def test_mma_multiplies_the_fragments_of_the_isa(name, library, rng):
    one, left, right = MMA[name]
    elements = 8 if isinstance(left, str) else 4 // left.itemsize
    (a_row, a_column), (b_row, b_column) = _fragments(elements)
    (a_codes, a), (b_codes, b) = (
        _draw(rng, kind, shape)
        for kind, shape in ((left, (16, 8 * elements)), (right, (8 * elements, 8)))
    )
    is_float = one.outputs[0] == "f"
    c = rng.choice([-(2**31), 2**31 - 1, 12345], (16, 8))  # integers wrap
    c = c / 2**20 if is_float else c
    row, column = _accumulator()
    registers = [
        _packed(codes[rows, columns], elements == 8)
        for codes, rows, columns in ((a_codes, a_row, a_column), (b_codes, b_row, b_column))
    ]
    before = c[row, column].astype("float32" if is_float else "int32")
    found = one.run(library, *registers, before).view(before.dtype)
    c[row, column] = before
    expected = (a @ b + c)[row, column]
    expected = expected.astype("float32") if is_float else expected.astype("int32")
    np.testing.assert_array_equal(found, expected)
