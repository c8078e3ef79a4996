"""Instructions of NVIDIA GPUs from sm_80 on, as PTX: copies to shared memory, fragments of tensor
cores and their products, words of float32.

With tensor cores a warp multiplies (16, 16) by (16, 8). Lane l holds of the left factor rows l // 4
and l // 4 + 8, of the right factor column l // 4, of the product rows l // 4 and l // 4 + 8, and in
each of them pairs of neighbours from 2 (l % 4) on: PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

CHUNK = 16
"""Bytes that one thread copies at once at most, and that one row of `ldmatrix` has."""

_HALF, _WORD = 2, 4
"""Bytes of an element that `load_matrices` and `load_words` read."""

_PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def local(count: int, dtype: str = "float32", value: float | None = None) -> tirx.Buffer:
    """Registers of a thread, filled with `value`."""
    buffer = T.alloc_buffer((count,), dtype, scope="local")
    if value is not None:
        with T.unroll(count) as i:
            T.buffer_store(buffer, tirx.const(value, dtype), [i])
    return buffer


def allocate_shared(size: int) -> tirx.Expr:
    """The address of a new buffer of `size` bytes.

    TVM, which does not follow it, adds no barriers of its own. It holds bytes and has a name of its
    own: CUDA wants one type for all arrays of a name in a module.
    """
    buffer = IRBuilder.name("attention_tiles", T.alloc_buffer((size,), "uint8", scope="shared.dyn"))
    address = T.alloc_buffer((1,), "uint32", scope="local")
    pointer = buffer.access_ptr("rw", extent=size)
    T.buffer_store(address, T.cuda.cvta_generic_to_shared(pointer), [0])
    return address[0]


def copy_chunk(
    shared: tirx.Expr, at: tirx.Expr, source: tirx.Expr, is_there: tirx.Expr | bool, size: int
) -> None:
    """Start to copy 16, 8 or 4 bytes from the address `source` to `at` bytes behind `shared`.

    Zeros if `is_there` does not hold; `source` is then not read.
    """
    copied = T.Cast("uint32", T.Select(is_there, size, 0))
    copy = T.ptx[f"cp.async.{'cg' if size == CHUNK else 'ca'}.shared.global"]
    T.evaluate(copy(shared + T.Cast("uint32", at), source, size, copied))


def commit_copies() -> None:
    """Make a group of the copies started since the last one."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait_for_copies(pending: int = 0) -> None:
    """Wait until this thread's groups are complete but the last `pending`, then for all threads."""
    T.evaluate(T.ptx["cp.async.wait_group"](pending))
    synchronize()


def synchronize() -> None:
    T.evaluate(T.tvm_storage_sync("shared"))


def load_matrices(
    registers: tirx.Buffer,
    first: tirx.Expr | int,
    shared: tirx.Expr,
    at: tirx.Expr,
    transposed: bool = False,
) -> None:
    """Four (8, 8) matrices to registers[first:first + 4]; `at` is where this lane's row starts.

    Lanes 0 to 7 give the rows of the first matrix, and so on. Lane l gets elements 2 (l % 4) and
    the next of row l // 4, `transposed` those rows of column l // 4.
    """
    trans = ".trans" if transposed else ""
    load = T.ptx[f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16"]
    T.evaluate(load(*_range(registers, first, 4), _address(shared, at, _HALF)))


def multiply_add(
    product: tirx.Buffer,
    first: tirx.Expr | int,
    left: Sequence[tirx.Expr],
    right: Sequence[tirx.Expr],
    dtype: str,
) -> None:
    """product[first:first + 4] += left · right in float32. Factors have two `dtype` a register."""
    kind = _PTX_TYPES[dtype]
    mma = T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"]
    accumulators = _range(product, first, 4)
    T.evaluate(mma(*accumulators, *left, *right, *accumulators))


def pack(register: tirx.Expr, lower: tirx.Expr, upper: tirx.Expr, dtype: str) -> None:
    """Two float32 rounded to `dtype`, in one register."""
    T.evaluate(T.ptx[f"cvt.rn.{_PTX_TYPES[dtype]}x2.f32"](register, upper, lower))


def load_words(registers: tirx.Buffer, first: int, shared: tirx.Expr, at: tirx.Expr) -> None:
    """Four float32 from `at` on to registers[first:first + 4]."""
    load = T.ptx["ld.shared.v4.f32"]
    T.evaluate(load(*_range(registers, first, 4), _address(shared, at, _WORD)))


def store_word(address: tirx.Expr, register: tirx.Expr) -> None:
    """Four bytes to global memory."""
    T.evaluate(T.ptx["st.global.b32"](address, register))


def store_words(address: tirx.Expr, values: Sequence[tirx.Expr]) -> None:
    """1, 2 or 4 float32 to global memory."""
    vector = f".v{len(values)}" if len(values) > 1 else ""
    T.evaluate(T.ptx[f"st.global{vector}.f32"](address, *values))


def from_neighbour(value: tirx.Expr, distance: int) -> tirx.Expr:
    """`value` of the lane whose number differs in the bit `distance`."""
    mask = tirx.const(0xFFFFFFFF, "uint32")
    return T.tvm_warp_shuffle_xor(mask, value, distance, 32, 32)


def from_lane_of_quad(value: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
    """`value` of the given one of the four lanes that share a row."""
    return T.tvm_warp_shuffle(tirx.const(0xFFFFFFFF, "uint32"), value, lane, 4, 32)


def _address(shared: tirx.Expr, at: tirx.Expr, element: int) -> tirx.Expr:
    return shared + T.Cast("uint32", at * element)


def _range(buffer: tirx.Buffer, first: tirx.Expr | int, count: int) -> list[tirx.Expr]:
    return [buffer[first + i] for i in range(count)]
