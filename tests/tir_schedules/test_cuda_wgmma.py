"""`wgmma` on the host: what it computes by the layouts of the PTX ISA, and what it refuses."""

import re

import ml_dtypes
import numpy as np
import pytest
from cuda_text import CudaTextError, GlobalArray, Kernels

BF16 = np.dtype(ml_dtypes.bfloat16)
INT8, UINT8, HALF = np.dtype("int8"), np.dtype("uint8"), np.dtype("float16")

# The mnemonic behind the shape, types of A and B, and columns
PRODUCTS = {
    "f16": ("k16.f32.f16.f16", HALF, HALF, 64),
    "bf16": ("k16.f32.bf16.bf16", BF16, BF16, 8),
    "s8": ("k32.s32.s8.s8", INT8, INT8, 24),
    "u8": ("k32.s32.u8.s8", UINT8, INT8, 32),
}
ATOM, STEP = 1024, 32
BYTES = 2 * 8 * ATOM  # two pieces of 128 bytes of up to 64 columns
STRIDE, SWIZZLE = (ATOM >> 4) << 32, 1 << 62


def body(label, name="f16", descriptor=STRIDE | SWIZZLE, **parts):
    """Copies B to shared memory as it is, then adds the products of two steps to D."""
    kind, _, _, columns = PRODUCTS[name]
    count, is_float = columns // 2, kind.startswith("k16")
    scalar, letter = ("float", "f") if is_float else ("uint", "r")
    d = ", ".join(f"%{i}" for i in range(count))
    a, right, adds = [f"%{count + i}" for i in range(4)], f"%{count + 4}", f"%{count + 5}"
    factors = ", 1, 1, 0" if is_float else ""
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    product = (
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, {adds}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}{kind} {{{d}}}, {{{', '.join(a)}}}, {right}, "
        f'p{factors}; }}" : {outputs} : "r"(a[STEP * 4]), "r"(a[STEP * 4 + 1]), '
        '"r"(a[STEP * 4 + 2]), "r"(a[STEP * 4 + 3]), "l"(right + STEP * 2), "r"(ADDS));'
    )
    steps = [product.replace("STEP", str(i)).replace("ADDS", f"adds | {i}") for i in range(2)]
    first, between = parts.get("before", "wgmma.fence.sync.aligned;"), parts.get("between", "")
    fence = parts.get("fence", "fence.proxy.async.shared::cta;")
    end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    return f"""
extern "C" __global__ void {label}({scalar}* out, {scalar}* before, uint* left, uint* b,
                                int adds, int start) {{
  extern __shared__ __align__(64) unsigned char pool[];
  uint shared = (__cvta_generic_to_shared(&pool[0]) + 1023) & ~1023u;
  int t = threadIdx.x;
  for (int i = t; i < {BYTES // 4}; i += blockDim.x)
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(shared + i * 4), "r"((uint)b[i]));
  asm volatile("{fence}" : : : "memory");
  {parts.get("barrier", "__syncthreads();")}
  {scalar} d[{count}];
  uint a[8];
  for (int i = 0; i < {count}; ++i) d[i] = before[t * {count} + i];
  for (int i = 0; i < 8; ++i) a[i] = left[t * 8 + i];
  uint64_t right = (uint64_t)(shared >> 4) + start + {descriptor}ull;
  asm volatile("{first}" : : : "memory");
  {parts.get("guard", "")} {{ {steps[0]} {between} {steps[1]} }}
  asm volatile("{parts.get("end", end)}" : : : "memory");
  {parts.get("after", "")}
  for (int i = 0; i < {count}; ++i) out[t * {count} + i] = d[i];
}}
"""


def drawn(rng, dtype, shape):
    if dtype.kind in "iu":
        return rng.integers(-100 if dtype == INT8 else 0, 100, shape).astype(dtype)
    return (rng.integers(-64, 64, shape) / 8).astype(dtype)


def registers(a, width):
    """Of each thread: warp w has rows 16 w on, as `mma` of (16, 8) has them; two steps."""
    thread = np.arange(128)[:, None]
    e = np.arange(4 * width * 2)  # elements of a thread
    step, register, inside = e // (4 * width), e // width % 4, e % width
    row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
    column = thread % 4 * width + inside + register // 2 * 4 * width + step * 8 * width
    return np.ascontiguousarray(a[row, column]).view("uint32")


def shared_memory(b):
    """(n, k) by the canonical layout, K-major: Swizzle<3, 4, 3> of ((8, m), 128 B):(128 B, SBO)."""
    n, k = np.indices(b.shape)
    byte = k * b.dtype.itemsize
    linear = n // 8 * ATOM + n % 8 * 128 + byte
    place = linear ^ ((linear >> 7 & 7) << 4)
    room = np.zeros(BYTES, "uint8")
    for i in range(b.dtype.itemsize):
        room[place + i] = b.view("uint8").reshape(*b.shape, -1)[..., i]
    return room


def sums(d):
    """(64, n) by thread: rows as those of A, of each tile of eight columns four."""
    thread, i = np.arange(128)[:, None], np.arange(d.shape[1] // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + i % 4 // 2 * 8
    return d[row, i // 4 * 8 + thread % 4 * 2 + i % 2]


def run(kernels, rng, label, name="f16", adds=1, threads=128, start=0):
    """What the kernel has at the end, and what it has to have."""
    _, left, right, columns = PRODUCTS[name]
    k, result = 2 * STEP // left.itemsize, "float32" if name in ("f16", "bf16") else "int32"
    a, b = drawn(rng, left, (64, k)), drawn(rng, right, (columns, 128 // left.itemsize))
    before = drawn(rng, INT8, (64, columns)).astype(result)
    inputs = [sums(before), registers(a, 4 // left.itemsize), shared_memory(b)]
    if threads > 128:
        inputs[:2] = [np.concatenate([x, x]) for x in inputs[:2]]
    out = GlobalArray("out", threads * columns // 2 * 4)
    arrays = [out, *(GlobalArray("in", x.nbytes, x) for x in inputs)]
    kernels.launch(label, [*arrays, adds, start], {"threadIdx.x": threads}, BYTES + 1023)
    used = b[:, start * 16 // left.itemsize :][:, :k].astype("float64")
    expected = before * adds + a.astype("float64") @ used.T
    found = out.bytes.view(result).reshape(threads, -1)
    return found, np.tile(sums(expected.astype(result)), (threads // 128, 1))


WRONG = {"strides": STRIDE // 2 | SWIZZLE, "start": (STRIDE | SWIZZLE) + 8}
_COMMIT, _WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
NOT_BORNE = {
    "no fence between proxies": ({"fence": ""}, "no fence.proxy.async"),
    "no barrier": ({"barrier": ""}, "without a barrier|read, but not written"),
    "no wgmma.fence": ({"before": ""}, "no wgmma.fence before"),
    "no wait": ({"end": _COMMIT}, "ends without a wait"),
    "no commit": ({"end": _WAIT}, "ends without a wait"),
    "a wait for the group before": (
        {"end": f"{_COMMIT} wgmma.wait_group.sync.aligned 1;"},
        "ends without a wait",
    ),
    "sums written": ({"between": "d[1] = 0;"}, "written before the wait"),
    "sums written, then the wait": (
        {"between": f'asm volatile("{_COMMIT}" : : : "memory"); d[1] = 0;', "end": _WAIT},
        "no wgmma.fence before",
    ),
    "a warp without a product": ({"guard": "if (t < 96)"}, "leaves its warpgroup"),
    "warps apart": ({"guard": "right += t / 32;"}, "warps of a warpgroup are apart"),
    "lanes apart": ({"guard": "right += t % 2;"}, "lanes of a warp are apart"),
    "no swizzle": ({"descriptor": STRIDE}, "not swizzled by 128"),
    "swizzle of 64 bytes": ({"descriptor": STRIDE | 2 << 62}, "not swizzled by 128"),
    "a base offset": ({"descriptor": STRIDE | SWIZZLE | 1 << 49}, "a base offset"),
    "operand overwritten": (
        {
            "end": _COMMIT,
            "after": '__syncthreads(); asm volatile("st.shared.b32 [%0], %1;" : : '
            f'"r"(shared), "r"(0)); asm volatile("{_WAIT}" : : : "memory");',
        },
        "written while a product reads it",
    ),
}


@pytest.fixture(scope="module")
def kernels():
    texts = [body(f"product_{name}", name) for name in PRODUCTS]
    texts += [body(_label(name), descriptor=value) for name, value in WRONG.items()]
    texts += [body(_label(name), **parts) for name, (parts, _) in NOT_BORNE.items()]
    return Kernels("".join(texts))


def _label(name):
    return re.sub(r"\W+", "_", name)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("adds", "start"), [(1, 0), (0, 4)])
def test_multiplies_the_layouts_of_the_isa(name, adds, start, kernels, rng):
    """At the start of a swizzled row and 64 bytes on, added to the sums and not."""
    found, expected = run(kernels, rng, f"product_{name}", name, adds, start=start)
    np.testing.assert_array_equal(found, expected)


def test_each_warpgroup_has_products_of_its_own(kernels, rng):
    found, expected = run(kernels, rng, "product_f16", threads=256)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("fault", WRONG)
def test_another_descriptor_is_another_matrix(fault, kernels, rng):
    found, expected = run(kernels, rng, _label(fault))
    assert (found != expected).mean() > 0.5


@pytest.mark.parametrize("name", NOT_BORNE)
def test_does_not_bear(name, kernels, rng):
    with pytest.raises(CudaTextError, match=NOT_BORNE[name][1]):
        run(kernels, rng, _label(name))


def test_a_block_has_whole_warpgroups(kernels, rng):
    with pytest.raises(CudaTextError, match="without whole warpgroups"):
        run(kernels, rng, "product_bf16", "bf16", threads=96)
