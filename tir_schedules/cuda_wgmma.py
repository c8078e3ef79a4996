"""Products of warpgroups, four warps, on tensor cores of sm_90a: asynchronous, the right factor in
shared memory.

With `wgmma` four warps, the first one's number a multiple of four, multiply (64, 16) by (16, n), of
one-byte elements (64, 32) by (32, n). Each has 16 rows of the left factor and of the product in its
registers, in the order of `mma.m16n8`, one tile of eight columns of the product after the other:
PTX ISA 9.0, section 9.7.15.5.1.1, "Register Fragments".

The right factor lies there by columns, 32 bytes of each for a product. Of a column 128 bytes follow
each other, and eight columns, 1024 bytes at a multiple of that, are an atom of the 128-byte
swizzle: bits 4 to 6 of an address are changed by an exclusive or with bits 7 to 9, the column. A
descriptor (section 9.7.15.5.1.2.2) holds the address of the first column's 32 bytes, which advances
within the 128, and the distance of atoms, each without its four lower bits; and in bits 62 and 63
the swizzle. The other distance is not used in a swizzled layout whose rows are along k.

`wgmma` reads memory by the asynchronous proxy (section 9.7.15.4). A `cp.async` that is not bulk
writes by the generic one, so that `publish_copies` stands between its wait and the barrier. No
register of a product may be used until `wait_for_products`, which also orders what is later
written to the memory that it read.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from .cuda_ptx import ptx

WARPGROUP = 4
"""Warps that multiply together."""

STEP_BYTES, ROW_BYTES, ATOM_BYTES = 32, 128, 1024
"""Of a column of the right factor in a product, of what lies together of it, of eight of them."""

_SWIZZLE_128B = 1
_CHUNK = 16
_DISTANCE = (ATOM_BYTES >> 4) << 32 | _SWIZZLE_128B << 62

_PRODUCTS = {
    "float16": "wgmma.mma_async.sync.aligned.m64n{}k16.f32.f16.f16",
    "bfloat16": "wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16",
    "s8": "wgmma.mma_async.sync.aligned.m64n{}k32.s32.s8.s8",
    "u8": "wgmma.mma_async.sync.aligned.m64n{}k32.s32.u8.s8",
}
_FLOATS = ("float16", "bfloat16")


def column_tiles(kind: str) -> tuple[int, ...]:
    """How many tiles of eight columns a product may have, by the kind of its factors."""
    return tuple(range(1, 33)) if kind in _FLOATS else (1, 2, 3, *range(4, 29, 2))


def swizzled(column: tirx.Expr, byte: tirx.Expr) -> tirx.Expr:
    """Where a byte of the 128 of a column lies behind the first atom."""
    return column * ROW_BYTES + (byte // _CHUNK ^ column % 8) * _CHUNK + byte % _CHUNK


def descriptor_start(address: tirx.Expr) -> tirx.Expr:
    """What `descriptor` takes for an address in shared memory, of which there are less than 2¹⁸."""
    start = T.Cast("uint64", address >> tirx.const(4, "uint32"))
    return T.Bind(start | tirx.const(_DISTANCE, "uint64"))


def descriptor(start: tirx.Expr, at: tirx.Expr | int) -> tirx.Expr:
    """Of a right factor whose first column's 32 bytes lie `at` bytes behind `start`."""
    return start + T.Cast("uint64", at // 16)


def publish_copies() -> None:
    """What this thread wrote to shared memory is there for products behind the next barrier."""
    T.evaluate(ptx("fence.proxy.async.shared::cta")())


def set_register(register: tirx.Expr, value: tirx.Expr) -> None:
    """register = value, by an instruction: what sums start with, before the next products begin.

    The compiler would put constants between the products, which ptxas then makes wait for each
    other.
    """
    T.evaluate(ptx("mov.b32")(register, value))


def begin_products() -> None:
    """The registers of the next products are written."""
    T.evaluate(ptx("wgmma.fence.sync.aligned")())


def start_product(
    sums: Sequence[tirx.Expr],
    left: Sequence[tirx.Expr],
    right: tirx.Expr,
    kind: str,
    adds: tirx.Expr | bool,
) -> None:
    """sums = left · right, or added to what is there, as `multiply_add` does by `kind`."""
    product = ptx(_PRODUCTS[kind].format(2 * len(sums)))
    factors = (1, 1, 0) if kind in _FLOATS else ()  # signs, and that right is along k
    T.evaluate(product(*sums, *left, right, T.Cast("bool", adds), *factors))


def wait_for_products() -> None:
    """Those started by this warpgroup are complete."""
    T.evaluate(ptx("wgmma.commit_group.sync.aligned")())
    T.evaluate(ptx("wgmma.wait_group.sync.aligned")(0))
