"""INT4 matmul and take against float64: unscheduled, scheduled for llvm, and built for CUDA."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
from kernel_runs import (
    ROWS,
    assert_close,
    compile_kernel,
    kernels,
    lower_relax,
    schedule,
    target,
)
from tvm import relax, tirx
from tvm.s_tir import dlight

from sits_tvm.config import QuantSpec
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import PackedLayout, interleave, pack, pack_nibbles, unpack
from tir_schedules.matmul.int4_matmul import int4_matmul, int4_take

G32 = QuantSpec(group_size=32, symmetric=False)
G64 = QuantSpec(group_size=64, symmetric=False, scale_dtype="float32")
G128 = QuantSpec(group_size=128)
PER_CHANNEL = QuantSpec(group_size=-1, symmetric=False)
SHAPES = [(40, 72, G64), (33, 4304, G32), (16, 640, G128), (50, 37, PER_CHANNEL), (1, 5, G32)]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def random_parts(rng, n, k, spec, order="vectors"):
    """Random bits everywhere, in the padding too, and scales of either sign."""
    layout = PackedLayout(n, k, spec, order)
    codes, scale, *zero = layout.shapes
    parts = [
        rng.integers(0, 1 << 32, codes, dtype=np.uint32),
        rng.normal(size=scale).astype(spec.scale_dtype),
        *(rng.integers(0, 1 << 32, shape, dtype=np.uint32) for shape in zero),
    ]
    return parts, unpack(tuple(parts), layout)


def compile_plain(func):
    """The function without any schedule."""
    kernel = tvm.compile(func, target="llvm")["main"]

    def run(*arrays, shape, dtype="float32"):
        output = tvm.runtime.tensor(np.full(shape, np.nan, dtype))
        kernel(*(tvm.runtime.tensor(array) for array in arrays), output)
        return output.numpy()

    return run


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("n", "k", "spec"), SHAPES)
def test_one_kernel_serves_every_number_of_rows(rng, n, k, spec, dtype):
    parts, weight = random_parts(rng, n, k, spec)
    run = compile_kernel(int4_matmul(None, n, k, spec, dtype, "vectors"))
    for m in ROWS:
        x = rng.standard_normal((m, k)).astype(dtype)
        y = run(x, *parts, shape=(m, n), dtype=dtype)
        assert_close(y, x.astype("float64") @ weight.T.astype("float64"), x, weight.T)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "k", "spec"), SHAPES)
def test_right_without_a_schedule(rng, n, k, spec, order):
    parts, weight = random_parts(rng, n, k, spec, order)
    run = compile_plain(int4_matmul(None, n, k, spec, "float32", order))
    x = rng.standard_normal((3, k)).astype("float32")
    assert_close(run(x, *parts, shape=(3, n)), x.astype("float64") @ weight.T, x, weight.T)


@pytest.mark.parametrize("name", ["haswell", "generic"])
def test_other_cpus(rng, name):
    parts, weight = random_parts(rng, 40, 72, G64)
    for dtype in ("float32", "float16"):
        run = compile_kernel(int4_matmul(None, 40, 72, G64, dtype, "vectors"), name)
        for m in (1, 2, 17):
            x = rng.standard_normal((m, 72)).astype(dtype)
            y = run(x, *parts, shape=(m, 40), dtype=dtype)
            assert_close(y, x.astype("float64") @ weight.T.astype("float64"), x, weight.T)


@pytest.mark.parametrize("rows", [1, 96])
def test_every_weight_is_where_it_belongs(rows):
    """One-hot rows read single weights of a ramp, all exactly: no element is moved or doubled."""
    n, k = 48, 96
    code = (np.arange(k)[None, :] + 3 * np.arange(n)[:, None]) % 16
    scale = np.exp2(-(np.arange(n) % 8))[:, None].repeat(3, 1).astype("float16")
    spec = QuantSpec(group_size=32)
    parts = interleave(pack_nibbles(code), 16), interleave(scale, 16)
    run = compile_kernel(int4_matmul(rows, n, k, spec, "float32", "vectors"))
    expected = ((code - 8) * scale[:, :1].astype("float32")).T
    for start in range(0, k, rows):
        x = np.eye(k, dtype="float32")[start : start + rows]
        y = run(x, *parts, shape=(rows, n))
        np.testing.assert_array_equal(y, expected[start : start + rows])


@pytest.mark.parametrize("rows", [1, 2])
def test_every_code_and_zero_point(rows):
    """Channel z has zero point z and weights (code - z) * 2^-3 for all 16 codes."""
    code = np.tile(np.arange(16), (16, 2))
    zero = np.arange(16)[:, None]
    scale = np.full((16, 1), 2.0**-3, "float32")
    spec = QuantSpec(group_size=32, symmetric=False, scale_dtype="float32")
    parts = [interleave(part, 16) for part in (pack_nibbles(code), scale, pack_nibbles(zero))]
    run = compile_kernel(int4_matmul(rows, 16, 32, spec, "float32", "vectors"))
    for column in range(16):
        x = np.zeros((rows, 32), "float32")
        x[:, column] = 1
        y = run(x, *parts, shape=(rows, 16))
        np.testing.assert_array_equal(y, np.tile((column - zero.T) / 8, (rows, 1)))


def test_weights_from_packing(rng):
    """`pack`, then the kernel, is the matmul with the weights that `unpack` gives back."""
    weight = rng.standard_normal((40, 72)).astype("float32")
    parts = pack(weight, G64, "vectors")
    restored = unpack(parts, PackedLayout(40, 72, G64, "vectors"))
    run = compile_kernel(int4_matmul(None, 40, 72, G64, "float32", "vectors"))
    for m in (1, 4):
        x = rng.standard_normal((m, 72)).astype("float32")
        assert_close(run(x, *parts, shape=(m, 40)), x.astype("float64") @ restored.T, x, restored.T)


def test_epilogue_joins_the_kernel(rng):
    """A call_tir with op_pattern 4, bias, gelu: FuseTIR leaves one kernel, which is scheduled."""
    n, k = 40, 72
    parts, weight = random_parts(rng, n, k, G64)
    builder = relax.BlockBuilder()
    m = tirx.Var("m", "int64")
    types = [relax.TensorType([m, k], "float32")]
    types += [relax.TensorType(list(part.shape), str(part.dtype)) for part in parts]
    types += [relax.TensorType([n], "float32")]
    arguments = [relax.Var(f"a{i}", ty) for i, ty in enumerate(types)]
    kernel = int4_matmul(None, n, k, G64, "float32", "vectors").with_attr("op_pattern", 4)
    kernel = kernel.without_attr("global_symbol")
    with builder.function("main", arguments):
        with builder.dataflow():
            gv = builder.add_func(kernel, "int4_matmul")
            y = builder.emit(
                relax.call_tir(gv, arguments[:-1], relax.TensorType([m, n], "float32"))
            )
            out = builder.emit_output(relax.op.nn.gelu(relax.op.add(y, arguments[-1])))
        builder.emit_func_output(out)
    lowered = lower_relax(builder.get())
    assert kernels(lowered) == {"fused_int4_matmul_add_gelu": True}
    vm = relax.VirtualMachine(relax.build(lowered, target()), tvm.cpu())
    torch = pytest.importorskip("torch")
    for rows in (1, 2, 17):
        x = rng.standard_normal((rows, k)).astype("float32")
        bias = rng.standard_normal(n).astype("float32")
        y = vm["main"](*(tvm.runtime.tensor(a) for a in (x, *parts, bias))).numpy()
        wide = [torch.tensor(a, dtype=torch.float64) for a in (x, weight, bias)]
        expected = torch.nn.functional.gelu(torch.nn.functional.linear(*wide)).numpy()
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_no_whole_weight_in_memory():
    """Scratch memory is a panel of 2^18 elements at most, not the 2^22 of the weight."""
    text = schedule(int4_matmul(None, 1024, 4096, G128, "float32", "vectors")).script()
    shapes = re.findall(r"alloc_buffer\(\(([^=\n]*?),?\)[,)]", text)
    sizes = [np.prod([int(e) for e in re.findall(r"T\.int64\((\d+)\)", shape)]) for shape in shapes]
    assert sizes
    assert max(sizes) <= 1 << 18


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("n", "k", "spec"), SHAPES)
def test_take(rng, n, k, spec, dtype, order):
    parts, weight = random_parts(rng, n, k, spec, order)
    for index_dtype in ("int32", "int64"):
        run = compile_plain(int4_take(None, n, k, spec, dtype, order, index_dtype))
        ids = rng.integers(0, n, 9).astype(index_dtype)
        taken = run(ids, *parts, shape=(9, k), dtype=dtype)
        np.testing.assert_array_equal(taken, weight[ids].astype(dtype))


def test_take_of_a_table_for_int8_activations(rng):
    """A table tied to a head that multiplies INT8 activations lies in the order of their bytes."""
    spec = QuantSpec(group_size=32, symmetric=False, activation="int8")
    parts, weight = random_parts(rng, 40, 72, spec, "fragments")
    run = compile_plain(int4_take(None, 40, 72, spec, "float32", "fragments"))
    ids = rng.integers(-3, 43, 30)
    expected = np.where(((ids >= 0) & (ids < 40))[:, None], weight[ids % 40], np.nan)
    np.testing.assert_array_equal(run(ids, *parts, shape=(30, 72)), expected)


RULES_OF_DLIGHT = (
    dlight.gpu.Matmul(),
    dlight.gpu.GEMV(),
    dlight.gpu.Reduction(),
    dlight.gpu.GeneralReduction(),
    dlight.gpu.Fallback(),
)


def nvcc():
    """The compiler of the pip package or of the system, or None."""
    try:
        import nvidia.cu13
    except ImportError:
        return shutil.which("nvcc")
    packaged = Path(next(iter(nvidia.cu13.__path__))) / "bin" / "nvcc"
    return str(packaged) if packaged.exists() else shutil.which("nvcc")


LARGE, SMALL = (640, 2048, G32), (40, 72, G64)
BY_DLIGHT = [
    # TVM simplifies the addresses of dlight's tensor-core schedule for a minute.
    pytest.param(*LARGE, None, "float16", marks=pytest.mark.slow),
    *[(*LARGE, *rest) for rest in ((1, "float16"), (None, "float32"), (1, "float32"))],
    *[(*SMALL, rows, dtype) for rows in (None, 1) for dtype in ("float16", "float32")],
    *[(*LARGE, rows, "bfloat16") for rows in (None, 1)],
]


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(("n", "k", "spec", "rows", "dtype"), BY_DLIGHT)
def test_compiles_for_cuda_through_dlight(tmp_path, n, k, spec, rows, dtype):
    cuda = tvm.target.Target(
        {
            "kind": "cuda",
            "arch": "sm_90",
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        },
        host={"kind": "llvm"},
    )
    module = tvm.IRModule({"main": int4_matmul(rows, n, k, spec, dtype, "fragments")})
    with cuda:
        scheduled = dlight.ApplyDefaultSchedule(*RULES_OF_DLIGHT)(module)
        source = tvm.compile(scheduled, target=cuda).mod.imports[0].inspect_source()
    # Every buffer of its own is in shared memory or registers: no dequantized weight in global.
    scopes = re.findall(r"alloc_buffer\(.*", scheduled.script())
    assert all("scope=" in allocation for allocation in scopes)
    assert bool(scopes) == ((rows, dtype) != (1, "float32"))  # which needs none
    file = tmp_path / "kernel.cu"
    file.write_text(source)
    command = [nvcc(), "-cubin", "-arch=sm_90", "-o", str(tmp_path / "kernel.cubin"), str(file)]
    environment = os.environ | {"PATH": f"{Path(nvcc()).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
