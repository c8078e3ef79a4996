"""Float32 activations as sums of three bfloat16, for tensor cores: 24 bits are three times eight.

A code minus its zero point is a bfloat16, too, so that three products on tensor cores are that of
float32, exactly before their sums in float32 are rounded.

Terms are x times 2^-s, so that no sum of a group is beyond float32 where the result is not; the
scale of the weight is multiplied by 2^s. Bits below 2^-126 of a term are lost, as TVM compiles.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tvm import tirx
from tvm.tirx.script import builder as T

from ..cuda_ptx import local
from ..emit import int64, when
from .block import row_and_block
from .operands import Operands

TERMS = 3

_LARGEST_CODE = 15
_VECTOR, _THREADS = 4, 128
"""Columns that a thread splits, and threads of a block."""

_ALIGNMENT = 8
"""Rows of terms have a multiple of columns: 16 bytes, copied at once."""

_UPPER, _ABSOLUTE, _INFINITY = 0xFFFF0000, 0x7FFFFFFF, 0x7F800000


def term_exponent(operands: Operands) -> int:
    """The s for which sums of a group of terms are within float32: 0 if X is not in terms.

    The same of X and of its terms, whose rows are padded.
    """
    columns = operands.weight.group_size if operands.is_grouped else _padded(operands.k)
    return 0 if operands.terms == 1 else math.ceil(math.log2(columns * _LARGEST_CODE))


def _padded(k: int) -> int:
    """Columns of rows of terms."""
    return -(-k // _ALIGNMENT) * _ALIGNMENT


def in_terms(operands: Operands) -> Operands:
    """A kernel that writes the terms of X (m, k) as pairs (m, 3, k / 2); zeros behind column k."""
    columns = _padded(operands.k)
    shape = operands.rows, int64(TERMS), int64(columns // 2)
    pairs, x = T.alloc_buffer(shape, "uint32", scope="global"), operands.flat().x
    vectors = columns // _VECTOR
    across = -(-vectors // _THREADS)
    with (
        T.launch_thread("blockIdx.x", operands.rows * across) as block_x,
        T.launch_thread("threadIdx.x", _THREADS) as thread,
    ):
        row, block = row_and_block(block_x, across)
        vector = block * _THREADS + thread
        with when(vectors % _THREADS == 0 or vector < vectors):
            rest = _read(x, row, vector * _VECTOR, operands.k, 2.0 ** -term_exponent(operands))
            for term in range(TERMS):
                _write(pairs, [row, int64(term)], vector * (_VECTOR // 2), rest)
                _subtract_term(rest)
    return replace(operands, x=pairs, k=columns)


def _read(x: tirx.Buffer, row: tirx.Expr, column: tirx.Expr, k: int, factor: float) -> tirx.Buffer:
    """Neighbours in a row of X, times `factor`; zeros behind column k."""
    are_there = k % _ALIGNMENT == 0
    values = local(_VECTOR, value=None if are_there else 0.0)
    if k % _VECTOR == 0:
        with when(are_there or column < k), T.vectorized(0, _VECTOR) as lane:
            T.buffer_store(values, x[row * k + T.Cast("int64", column + lane)], [lane])
    else:
        for lane in range(_VECTOR):
            at = T.Cast("int64", column + lane)
            value = x[row * k + tirx.min(at, int64(k - 1))]
            T.buffer_store(values, T.Select(at < k, value, tirx.const(0.0, "float32")), [lane])
    for lane in range(_VECTOR):
        T.buffer_store(values, values[lane] * tirx.const(factor, "float32"), [lane])
    return values


def _write(pairs: tirx.Buffer, at: list[tirx.Expr], column: tirx.Expr, rest: tirx.Buffer) -> None:
    """The upper halves of numbers: bfloat16 nearest to them towards zero."""
    words = local(_VECTOR // 2, "uint32")
    for i in range(_VECTOR // 2):
        low, high = (tirx.reinterpret("uint32", rest[2 * i + e]) for e in range(2))
        word = low >> tirx.const(16, "uint32") | high & tirx.const(_UPPER, "uint32")
        T.buffer_store(words, word, [i])
    with T.vectorized(0, _VECTOR // 2) as lane:
        T.buffer_store(pairs, words[lane], [*at, T.Cast("int64", column + lane)])


def _subtract_term(rest: tirx.Buffer) -> None:
    """What a term leaves, exactly; of an infinity nothing, of a NaN, whose term may be one, NaN."""
    for lane in range(_VECTOR):
        bits = T.Bind(tirx.reinterpret("uint32", rest[lane]))
        term = tirx.reinterpret("float32", bits & tirx.const(_UPPER, "uint32"))
        is_infinite = (bits & tirx.const(_ABSOLUTE, "uint32")) == tirx.const(_INFINITY, "uint32")
        left = T.Select(is_infinite, tirx.const(0.0, "float32"), rest[lane] - term)
        T.buffer_store(rest, left, [lane])
