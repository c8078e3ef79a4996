"""What the host bears and does not bear of a kernel: small CUDA texts, each right or wrong."""

import re

import numpy as np
import pytest
from attention_cuda_runs import TARGET
from cuda_text import CudaText, CudaTextError, GlobalArray, Kernels
from tvm.script import tirx as T

# 64 threads each: x, an input, and y, an output, hold 64 words
BODIES = {
    "own": "tile[t] = x[t]; y[t] = tile[t];",
    "other": "tile[t] = x[t]; y[t] = tile[63 - t];",
    "other, barrier": "tile[t] = x[t]; __syncthreads(); y[t] = tile[63 - t];",
    "other, barrier in turn": (
        "tile[t] = x[t]; if (t < 32) __syncthreads(); else __syncthreads();\ny[t] = tile[63 - t];"
    ),
    "other, barriers of two lines": (
        "tile[t] = x[t]; if (t < 32) __syncthreads(); else\n__syncthreads(); y[t] = tile[63 - t];"
    ),
    "of the warp": "tile[t] = x[t]; y[t] = tile[t ^ 31];",
    "of the warp, barrier": "tile[t] = x[t]; __syncwarp(); y[t] = tile[t ^ 31];",
    "of another warp, barrier": "tile[t] = x[t]; __syncwarp(); y[t] = tile[t ^ 32];",
    "overwritten": "tile[t] = 1; __syncthreads(); y[t] = tile[63 - t]; tile[t] = 2;",
    "overwritten, barriers": (
        "tile[t] = 1; __syncthreads(); y[t] = tile[63 - t]; __syncthreads(); tile[t] = 2;"
    ),
    "overwritten in a warp": "tile[t] = 1; __syncwarp(); y[t] = tile[t ^ 1]; tile[t] = 2;",
    "overwritten in a warp, barrier": (
        "tile[t] = 1; __syncwarp(); y[t] = tile[t ^ 1]; __syncwarp(); tile[t] = 2;"
    ),
    "read by several": "tile[t] = 1; __syncthreads(); y[t] = tile[5]; if (t == 5) tile[5] = 2;",
    "read by two warps": (
        "tile[t] = 1; __syncthreads(); y[t] = tile[5]; __syncwarp(); if (t == 5) tile[5] = 2;"
    ),
    "read by two warps, too": (
        "tile[t] = 1; __syncthreads(); y[t] = tile[5]; __syncwarp(); if (t == 37) tile[5] = 2;"
    ),
    "written twice": "tile[t / 2] = 1; y[t] = 0;",
    "not written": "if (t) tile[t] = x[t]; y[t] = tile[t];",
    "beyond": "tile[t + 1] = x[t]; y[t] = 0;",
    "before": "tile[t - 1] = x[t]; y[t] = 0;",
    "static": "small[t % 4 * 16 + t / 4] = x[t]; __syncthreads(); y[t] = small[t];",
    "static, beyond": "small[t + 1] = x[t]; y[t] = 0;",
    "bytes of a word": "((uchar*)tile)[t] = t; y[t] = ((uchar*)tile)[t];",
    "vectors": "*(uint4*)(small + t / 4 * 4) = *(uint4*)(x + t / 4 * 4); y[t] = small[t];",
    "vectors of one": (
        "if (t % 4 == 0) *(uint4*)(small + t) = *(uint4*)(x + t); __syncwarp(); y[t] = small[t];"
    ),
    "misaligned": "*(uint2*)(tile + t % 2) = *(uint2*)(x); y[t] = 0;",
    "misaligned input": "*(uint2*)(tile + 2 * t) = *(uint2*)(x + 1); y[t] = 0;",
    "input beyond": "y[t] = x[t + 1];",
    "input before": "y[t] = x[t - 1];",
    "input written": "y[t] = 0; x[t] = 0;",
    "output read": "y[t] = y[t] + 1;",
    "output read again": "y[t] = 1; y[t] = y[t] + 1;",
    "output of another": "y[t] = 1; y[t ^ 1] = 2;",
    "output of another read": "y[t] = 1; tile[t] = y[t ^ 1];",
    "output of another read, barrier": "y[t] = 1; __syncthreads(); tile[t] = y[t ^ 1];",
    "one block writes": (
        "if (blockIdx.x == 0) y[t] = x[t]; __syncthreads(); if (blockIdx.x == 1) tile[t] = y[t];"
    ),
    "registers": "uint r[4]; r[t % 4] = t; y[t] = r[t % 4];",
    "registers beyond": "uint r[4]; r[t % 8] = t; y[t] = r[t % 4];",
    "registers by address": "uint r[4]; *(uint2*)(r + 2) = make_uint2(t, t); y[t] = r[3];",
    "far above registers": "uint r[4]; y[t] = *(uint*)(r + 100000);",
    "far below registers": "uint r[4]; y[t] = *(uint*)(r - 100000);",
    "shuffle": "y[t] = __shfl_xor_sync((uint)4294967295, t, 1, 32);",
    "shuffle of some": "y[t] = 0; if (t % 2) __shfl_xor_sync((uint)4294967295, t, 2, 32);",
    "shuffle with a mask": "y[t] = __shfl_xor_sync(3, t, 1, 32);",
    "two shuffles": (
        "y[t] = 0; if (t % 2) __shfl_xor_sync((uint)4294967295, t, 2, 32); else\n"
        "__shfl_xor_sync((uint)4294967295, t, 2, 32);"
    ),
    "shuffle and barrier": (
        "y[t] = 0; if (t % 2) __syncwarp(); else __shfl_xor_sync((uint)4294967295, t, 2, 32);"
    ),
    "a lane leaves": "y[t] = 0; if (t == 40) return; __syncthreads();",
    "a warp leaves": "y[t] = 0; if (t < 32) return; __syncthreads();",
    "barrier of a warp": "y[t] = 0; if (t < 32) __syncthreads();",
}
MESSAGES = {
    "other": "read without a barrier after thread|read, but not written",
    "other, barriers of two lines": "apart: at __syncthreads, thread 0 at line",
    "of the warp": "read, but not written",
    "of another warp, barrier": "read without a barrier after|read, but not written",
    "overwritten": "overwritten while other threads may read it|read without a barrier after",
    "overwritten in a warp": (
        "overwritten while other threads may read it|read without a barrier after"
    ),
    "read by several": "overwritten while other threads may read it",
    "read by two warps": "overwritten while other threads may read it|read without a barrier",
    "read by two warps, too": "overwritten while other threads may read it|read without a barrier",
    "written twice": "written by two threads without a barrier",
    "not written": "thread 0: shared memory: read, but not written",
    "beyond": "thread 63: shared memory: out of bounds|between two arrays",
    "before": "thread 0: shared memory: out of bounds: bytes -4 to 0 of",
    "static, beyond": "thread 63: shared memory: out of bounds: bytes",
    "vectors": "overwritten while other threads may read it",
    "misaligned": "shared memory: misaligned: 8 bytes at byte 4",
    "misaligned input": "x: misaligned: 8 bytes at byte 4",
    "input beyond": "thread 63: x: out of bounds: bytes 256 to 260 of 256",
    "input before": "thread 0: x: out of bounds: bytes -4 to 0 of 256",
    "input written": "x: an input is written",
    "output read": "y: byte 0 is read, but not written|y: byte 128 is read",
    "output of another": "is written that another thread writes",
    "output of another read": "is read that another thread writes|is read, but not written",
    "far above registers": "an address that is not of this thread's registers",
    "far below registers": "an address that is not of this thread's registers",
    "registers beyond": "an array of the thread: index 4 is out of bounds",
    "shuffle of some": "threads are apart: shuffle, thread .* at the end",
    "shuffle with a mask": "an operation of some lanes: mask 00000003",
    "two shuffles": "threads are apart: shuffle, thread .*: shuffle",
    "shuffle and barrier": "threads are apart",
    "a lane leaves": "thread 40: threads are apart: at the end, .*: at __syncthreads",
    "a warp leaves": "threads are apart",
    "barrier of a warp": "threads are apart",
}
KERNEL = """
extern "C" __global__ void __launch_bounds__(64) k{}(uint* __restrict__ x, uint* __restrict__ y) {{
  extern __shared__ __align__(64) uint tile[];
  __shared__ __align__(64) uint small[64];
  int t = threadIdx.x;
  {}
}}
"""


@pytest.fixture(scope="module")
def small_kernels():
    text = "#define uint unsigned int\n#define uchar unsigned char\n"
    return Kernels(text + "".join(KERNEL.format(i, BODIES[x]) for i, x in enumerate(BODIES)))


def launch(kernels, name, seed=0, blocks=1):
    x = GlobalArray("x", 256, np.arange(64, dtype="uint32"))
    y = GlobalArray("y", 256)
    extents = {"blockIdx.x": blocks, "threadIdx.x": 64}
    kernels.seed = seed
    kernels.launch(f"k{list(BODIES).index(name)}", [x, y], extents, 256)
    assert y.counts.all()


@pytest.mark.parametrize("name", [name for name in BODIES if name not in MESSAGES])
def test_bears_what_is_right(name, small_kernels):
    for seed in range(8):
        launch(small_kernels, name, seed)


@pytest.mark.parametrize("name", MESSAGES)
def test_sees_what_is_wrong_in_any_order_of_warps(name, small_kernels):
    for seed in range(8):
        with pytest.raises(CudaTextError, match=MESSAGES[name]):
            launch(small_kernels, name, seed)


def test_sees_what_another_block_writes(small_kernels):
    launch(small_kernels, "one block writes", blocks=1)
    with pytest.raises(CudaTextError, match="y: byte 0 is read that another thread writes"):
        launch(small_kernels, "one block writes", blocks=2)


@T.prim_func(s_tir=True)
def _two_ways(a: T.handle, b: T.handle):
    m = T.int64()
    A = T.match_buffer(a, (m, 64), "float16")
    B = T.match_buffer(b, (m, 64), "float16")
    W = T.alloc_buffer((m, 64), "float16")
    if m <= T.int64(4):
        for i in T.thread_binding(m, "blockIdx.x"):
            for j in T.thread_binding(32, "threadIdx.x"):
                for k in T.vectorized(2):
                    B[i, j * 2 + k] = A[i, j * 2 + k] + T.float16(1)
    else:
        for i in T.thread_binding(m, "blockIdx.x"):
            for j in T.thread_binding(32, "threadIdx.x"):
                for k in T.vectorized(2):
                    W[i, j * 2 + k] = A[i, j * 2 + k] * T.float16(3)
        for i in T.thread_binding(m, "blockIdx.x"):
            for j in T.thread_binding(64, "threadIdx.x"):
                B[i, j] = W[i, T.int64(63) - j] + T.float16(1)


def test_the_host_function_chooses_kernels_and_passes_a_workspace(rng):
    compiled = CudaText(_two_ways, TARGET)
    for rows in (1, 4, 5, 9):
        a = rng.standard_normal((rows, 64)).astype("float16")
        out = np.zeros_like(a)
        compiled(a, out)
        tripled = (a * np.float16(3))[:, ::-1]
        expected = (a if rows <= 4 else tripled) + np.float16(1)
        np.testing.assert_array_equal(out, expected)


def test_a_workspace_must_be_written_before_it_is_read(rng):
    store = r"\*\(half2\*\)\(W_ptr .*;"
    broken = CudaText(_two_ways, TARGET).edited(lambda text: re.sub(store, "", text))
    a = rng.standard_normal((5, 64)).astype("float16")
    with pytest.raises(CudaTextError, match=r"W: byte .* is read, but not written"):
        broken(a, np.zeros_like(a))


def test_unknown_instructions_are_named():
    text = KERNEL.format(0, 'asm volatile("bfind.u32 %0, %1;" : "=r"(t) : "r"(t));')
    with pytest.raises(NotImplementedError, match=r"bfind\.u32 %0, %1"):
        Kernels(text)
