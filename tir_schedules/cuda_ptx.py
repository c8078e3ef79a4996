"""Instructions of NVIDIA GPUs from sm_80 on, as PTX: copies to shared memory, fragments of tensor
cores and their products, words of float32.

With tensor cores a warp multiplies (16, 16) by (16, 8). Lane l holds of the left factor rows l // 4
and l // 4 + 8, of the right factor column l // 4, of the product rows l // 4 and l // 4 + 8, and in
each of them pairs of neighbours from 2 (l % 4) on: PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

CHUNK = 16
"""Bytes that one thread copies at once at most, and that one row of `ldmatrix` has."""

_WORD = 4

_PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}
_PRODUCTS = {
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "s8": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    "u8": "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32",
    "s4": "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
    "u4": "mma.sync.aligned.m16n8k64.row.col.s32.u4.s4.s32",
}
_WORDS = {"float32": "f32", "uint32": "b32"}


@cache
def ptx(text: str) -> Any:
    """`T.ptx[text]`, which TVM looks up modifier by modifier in its table, each time anew."""
    return T.ptx[text]


def local(count: int, dtype: str = "float32", value: float | None = None) -> tirx.Buffer:
    """Registers of a thread, filled with `value`."""
    buffer = T.alloc_buffer((count,), dtype, scope="local")
    if value is not None:
        with T.unroll(count) as i:
            T.buffer_store(buffer, tirx.const(value, dtype), [i])
    return buffer


def allocate_shared(size: int, name: str, alignment: int = CHUNK) -> tirx.Expr:
    """The address of a new buffer of `size` bytes, at a multiple of `alignment`.

    TVM, which does not follow it, adds no barriers of its own. It holds bytes and has a name of its
    own: CUDA wants one type for all arrays of a name in a module.
    """
    spare = alignment - CHUNK
    buffer = IRBuilder.name(name, T.alloc_buffer((size + spare,), "uint8", scope="shared.dyn"))
    address = T.alloc_buffer((1,), "uint32", scope="local")
    pointer = buffer.access_ptr("rw", extent=size + spare)
    start = T.cuda.cvta_generic_to_shared(pointer)
    if spare:
        start = (start + tirx.const(spare, "uint32")) & tirx.const(-alignment % 2**32, "uint32")
    T.buffer_store(address, start, [0])
    return address[0]


def copy_chunk(
    shared: tirx.Expr,
    at: tirx.Expr,
    source: tirx.Expr,
    is_there: tirx.Expr | bool,
    size: int,
    copies: tirx.Expr | bool = True,
) -> None:
    """Start to copy 16, 8 or 4 bytes from the address `source` to `at` bytes behind `shared`.

    Zeros if `is_there` does not hold; `source` is then not read. Only threads for which `copies`
    holds do anything.
    """
    copied = size if is_there is True else T.Select(is_there, size, 0)
    copy = ptx(f"cp.async.{'cg' if size == CHUNK else 'ca'}.shared.global")
    guard = {} if copies is True else {"pred": copies}
    T.evaluate(copy(shared + T.Cast("uint32", at), source, size, T.Cast("uint32", copied), **guard))


def commit_copies() -> None:
    """Make a group of the copies started since the last one."""
    T.evaluate(ptx("cp.async.commit_group")())


def wait_for_copies(pending: int = 0) -> None:
    """Wait until this thread's groups are complete but the last `pending`, then for all threads."""
    wait_for_own_copies(pending)
    synchronize()


def wait_for_own_copies(pending: int) -> None:
    T.evaluate(ptx("cp.async.wait_group")(pending))


def synchronize() -> None:
    T.evaluate(T.tvm_storage_sync("shared"))


def synchronize_warp() -> None:
    T.evaluate(ptx("bar.warp.sync")(tirx.const(0xFFFFFFFF, "uint32")))


def load_matrices(
    registers: tirx.Buffer,
    first: tirx.Expr | int,
    shared: tirx.Expr,
    at: tirx.Expr,
    transposed: bool = False,
    count: int = 4,
) -> None:
    """1, 2 or 4 (8, 8) matrices of two-byte elements to registers[first:first + count].

    Lanes 0 to 7 give the rows of the first matrix, `at` bytes behind `shared`, and so on. Lane l
    gets elements 2 (l % 4) and the next of row l // 4, `transposed` those rows of column l // 4.
    """
    trans = ".trans" if transposed else ""
    load = ptx(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16")
    T.evaluate(load(*_range(registers, first, count), shared + T.Cast("uint32", at)))


def multiply_add(
    product: tirx.Buffer,
    first: tirx.Expr | int,
    left: Sequence[tirx.Expr],
    right: Sequence[tirx.Expr],
    kind: str,
    start: Sequence[tirx.Expr] | None = None,
) -> None:
    """product[first:first + 4] = start + left · right, or added to what is there.

    By `kind` the factors are "float16" or "bfloat16", 16 columns and float32 sums, or 32 columns of
    "s8", with the left one "s8" or "u8", and int32 sums in uint32. Or 64 columns of "s4", likewise:
    on sm_80 to sm_89 only, elsewhere it is a call.
    """
    results = _range(product, first, 4)
    T.evaluate(ptx(_PRODUCTS[kind])(*results, *left, *right, *(start or results)))


def add_pairs(pair: tirx.Expr, addend: tirx.Expr, dtype: str) -> None:
    """pair += addend, two numbers of `dtype` each. sm_80 has no addition of bfloat16."""
    if dtype == "float16":
        T.evaluate(ptx("add.f16x2")(pair, pair, addend))
    else:
        one = tirx.const(0x3F803F80, "uint32")
        T.evaluate(ptx("fma.rn.bf16x2")(pair, pair, one, addend))


def pack(register: tirx.Expr, lower: tirx.Expr, upper: tirx.Expr, dtype: str) -> None:
    """Two float32 rounded to `dtype`, in one register."""
    T.evaluate(ptx(f"cvt.rn.{_PTX_TYPES[dtype]}x2.f32")(register, upper, lower))


def permute_bytes(result: tirx.Expr, low: tirx.Expr, high: tirx.Expr, selector: tirx.Expr) -> None:
    """Bytes of `low` (0 to 3) and `high` (4 to 7), by the nibbles of `selector` from the lowest."""
    T.evaluate(ptx("prmt.b32")(result, low, high, selector))


def replicate_byte(result: tirx.Expr, word: tirx.Expr, byte: tirx.Expr) -> None:
    """In every byte of the result the one of `word` whose number `byte` is modulo 4."""
    T.evaluate(ptx("prmt.b32.rc8")(result, word, word, byte))


def fused_multiply_add(result: tirx.Expr, a: tirx.Expr, b: tirx.Expr, addend: tirx.Expr) -> None:
    """result = a · b + addend in float32, rounded once."""
    T.evaluate(ptx("fma.rn.f32")(result, a, b, addend))


def approximate_reciprocal(result: tirx.Expr, x: tirx.Expr) -> None:
    """result = 1 / x, one unit in the last place off at most; results below 2**-126 are 0."""
    T.evaluate(ptx("rcp.approx.ftz.f32")(result, x))


def add_bytes(total: tirx.Expr, word: tirx.Expr) -> None:
    """total += the four int8 of `word`, in int32."""
    T.evaluate(ptx("dp4a.s32.s32")(total, word, tirx.const(0x01010101, "int32"), total))


def load_words(registers: tirx.Buffer, first: int, shared: tirx.Expr, at: tirx.Expr) -> None:
    """Four float32 from `at` on to registers[first:first + 4]."""
    load_shared(registers, first, shared, at * _WORD, 4)


def load_shared(
    registers: tirx.Buffer, first: int, shared: tirx.Expr, at: tirx.Expr, count: int
) -> None:
    """1, 2 or 4 words, `at` bytes behind `shared`, to registers[first:first + count]."""
    load = ptx(f"ld.shared{_vector(count)}.{_WORDS[str(registers.dtype)]}")
    T.evaluate(load(*_range(registers, first, count), shared + T.Cast("uint32", at)))


def store_shared(shared: tirx.Expr, at: tirx.Expr, value: tirx.Expr) -> None:
    """A float32, `at` bytes behind `shared`."""
    T.evaluate(ptx("st.shared.f32")(shared + T.Cast("uint32", at), value))


def store_word(address: tirx.Expr, register: tirx.Expr) -> None:
    """Four bytes to global memory."""
    T.evaluate(ptx("st.global.b32")(address, register))


def store_words(address: tirx.Expr, values: Sequence[tirx.Expr]) -> None:
    """1, 2 or 4 float32 to global memory."""
    T.evaluate(ptx(f"st.global{_vector(len(values))}.f32")(address, *values))


def opaque(constant: int) -> tirx.Expr:
    """A constant that ptxas does not know as one: it keeps it in a register.

    An instruction takes one constant; ptxas would move a second one to a register each time. All
    lanes are active here, so that the mask of the active ones is -1.
    """
    active = local(1, "uint32")
    T.evaluate(ptx("activemask.b32")(active[0]))
    return active[0] + tirx.const(constant + 1, "uint32")


def from_neighbour(value: tirx.Expr, distance: int) -> tirx.Expr:
    """`value` of the lane whose number differs in the bit `distance`."""
    mask = tirx.const(0xFFFFFFFF, "uint32")
    return T.tvm_warp_shuffle_xor(mask, value, distance, 32, 32)


def from_lane(value: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
    """`value` of the given one of the 32 lanes."""
    return T.tvm_warp_shuffle(tirx.const(0xFFFFFFFF, "uint32"), value, lane, 32, 32)


def from_lane_of_quad(value: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
    """`value` of the given one of the four lanes that share a row."""
    return T.tvm_warp_shuffle(tirx.const(0xFFFFFFFF, "uint32"), value, lane, 4, 32)


def _vector(count: int) -> str:
    return f".v{count}" if count > 1 else ""


def _range(buffer: tirx.Buffer, first: tirx.Expr | int, count: int) -> list[tirx.Expr]:
    return [buffer[first + i] for i in range(count)]
