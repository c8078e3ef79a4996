"""Each instruction on memory in cuda_host_ptx.h by itself, against the PTX ISA in NumPy."""

import numpy as np
import pytest
from cuda_text import CudaTextError, GlobalArray, Kernels

_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x{}{}.shared.b16"
MEMORY = "".join(
    f"""
extern "C" __global__ void matrices{count}{trans[1:]}(unsigned int* data, unsigned int* addresses,
                                                      unsigned int* out) {{
  extern __shared__ __align__(64) unsigned tile[];
  int t = threadIdx.x;
  for (int i = t; i < 512; i += 32) tile[i] = data[i];
  __syncthreads();
  unsigned int r[{count}];
  asm volatile("{_LDMATRIX.format(count, trans)} {{{", ".join(f"%{i}" for i in range(count))}}}, "
               "[%{count}];"
               : {", ".join(f'"=r"(r[{i}])' for i in range(count))}
               : "r"((unsigned)__cvta_generic_to_shared(tile) + addresses[t]) : "memory");
  for (int i = 0; i < {count}; ++i) out[t * {count} + i] = r[i];
}}
"""
    for count in (1, 2, 4)
    for trans in ("", ".trans")
)
MEMORY += """
extern "C" __global__ void vectors(unsigned int* data, unsigned int* out) {
  extern __shared__ __align__(64) unsigned tile[];
  int t = threadIdx.x;
  unsigned int a, b, c, d, at = __cvta_generic_to_shared(tile) + 16 * t;
  float e, f, g, h;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(&(data[4 * t])));
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};\\n\\tst.shared.b32 [%0 + 8], %3;\\n"
               "\\tst.shared.b32 [%0 + 12], %4;" : : "r"(at), "r"(d), "r"(c), "r"(b), "r"(a));
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(e), "=f"(f), "=f"(g), "=f"(h) : "r"(at));
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
               : : "l"(&(out[4 * t])), "f"(e), "f"(f), "f"(g), "f"(h));
}
extern "C" __global__ void copies(unsigned int* data, unsigned int* sizes, unsigned int* out) {
  extern __shared__ __align__(64) unsigned tile[];
  int t = threadIdx.x;
  unsigned int at = __cvta_generic_to_shared(tile) + 16 * t;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               : : "r"(at), "l"(&(data[4 * t])), "r"(sizes[t]) : "memory");
  asm volatile("cp.async.wait_all;");
  for (int i = 0; i < 4; ++i) out[4 * t + i] = tile[4 * t + i];
}
extern "C" __global__ void overwritten(unsigned int* data, unsigned int* out) {
  extern __shared__ __align__(64) unsigned tile[];
  int t = threadIdx.x;
  unsigned int at = __cvta_generic_to_shared(tile) + 4 * t;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               : : "r"(at), "l"(&(data[t])) : "memory");
  tile[t] = 1;
  asm volatile("cp.async.wait_all;");
}
extern "C" __global__ void narrow(unsigned int* data, unsigned int* out) {
  extern __shared__ __align__(64) unsigned tile[];
  unsigned int at = __cvta_generic_to_shared(tile);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 8;" : : "r"(at), "l"(&(data[0])));
}
extern "C" __global__ void excess(unsigned int* data, unsigned int* out) {
  extern __shared__ __align__(64) unsigned tile[];
  unsigned int at = __cvta_generic_to_shared(tile);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, 8;" : : "r"(at), "l"(&(data[0])));
}
extern "C" __global__ void groups(unsigned int* data, unsigned int* pending, unsigned int* out) {
  extern __shared__ __align__(64) unsigned tile[];
  int t = threadIdx.x;
  unsigned int at = __cvta_generic_to_shared(tile) + 12 * t;
  for (int i = 0; i < 3; ++i) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 : : "r"(at + 4 * i), "l"(&(data[3 * t + i])) : "memory");
    asm volatile("cp.async.commit_group;");
  }
  if (pending[0] == 2) asm volatile("cp.async.wait_group 2;");
  if (pending[0] == 1) asm volatile("cp.async.wait_group 1;");
  if (pending[0] == 0) asm volatile("cp.async.wait_group 0;");
  for (int i = 0; i < (int)pending[1]; ++i) out[3 * t + i] = tile[3 * t + i];
}
"""


@pytest.fixture(scope="module")
def library():
    return Kernels(MEMORY)


def _launched(library, name, *inputs, size):
    arrays = [GlobalArray("in", x.nbytes, x) for x in inputs] + [GlobalArray("out", size * 4)]
    library.launch(name, arrays, {"threadIdx.x": 32}, 2048)
    return arrays[-1].bytes.view("uint32").copy()


@pytest.mark.parametrize("trans", ["", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_gives_rows_or_columns(count, trans, library, rng):
    data = rng.integers(0, 2**32, 512, "uint32")
    rows = rng.permutation(128)[:32].astype("uint32")  # of 16 bytes
    found = _launched(library, f"matrices{count}{trans}", data, rows * 16, size=32 * count)
    for matrix in range(count):
        content = data.view("uint16").reshape(128, 8)[rows[8 * matrix : 8 * matrix + 8]]
        content = content.T if trans else content
        for lane in range(32):
            low, high = content[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].astype("uint32")
            assert found[lane * count + matrix] == low | high << 16


def test_loads_and_stores_of_vectors_keep_the_order(library, rng):
    data = rng.integers(0, 2**32, 128, "uint32")
    found = _launched(library, "vectors", data, size=128)
    np.testing.assert_array_equal(found.reshape(32, 4), data.reshape(32, 4)[:, ::-1])


def test_copies_fill_up_with_zeros(library, rng):
    data, sizes = rng.integers(1, 2**32, 128, "uint32"), np.arange(32, dtype="uint32") % 5 * 4
    found = _launched(library, "copies", data, sizes, size=128)
    kept = np.arange(4) < sizes[:, None] // 4
    np.testing.assert_array_equal(found.reshape(32, 4), np.where(kept, data.reshape(32, 4), 0))


@pytest.mark.parametrize("pending", [0, 1, 2])
def test_a_wait_covers_all_groups_but_the_last(pending, library, rng):
    data = rng.integers(0, 2**32, 96, "uint32")
    ready = np.array([pending, 3 - pending], "uint32")
    found = _launched(library, "groups", data, ready, size=96).reshape(32, 3)
    np.testing.assert_array_equal(found[:, : ready[1]], data.reshape(32, 3)[:, : ready[1]])
    if pending:
        with pytest.raises(CudaTextError, match="before its copy is complete"):
            _launched(library, "groups", data, ready + np.array([0, 1], "uint32"), size=96)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("overwritten", "written while a copy is under way"),
        ("narrow", "cp.async.cg: 8 bytes"),
        ("excess", "cp.async: 4 bytes, of which 8 are read"),
    ],
)
def test_copies_that_a_gpu_need_not_bear(name, message, library):
    with pytest.raises(CudaTextError, match=message):
        _launched(library, name, np.ones(32, "uint32"), size=32)
