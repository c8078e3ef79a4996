"""CUDA text becomes machine code; what is read back is compared with nvdisasm's text output."""

import re
import subprocess
import tempfile
from types import SimpleNamespace

import pytest
import tvm
from cuda_sources import Linear, holding, needs_nvcc
from small_modules import one_function
from tvm import relax, tirx
from tvm.support import nvcc

import sits_tvm
from sits_tvm import Config, QuantSpec
from sits_tvm.device_code import (
    Launch,
    check_device_code,
    compile_device_code,
    find_toolkit,
    record_launches,
)
from sits_tvm.device_code.nvcc import PTXAS_OPTIONS
from sits_tvm.diagnostics import collect
from sits_tvm.quick_parsing import load_tensor_intrinsics
from sits_tvm.report import Kernel, Report
from sits_tvm.target import parse_target
from sits_tvm.tuning.static_code import compile_kernels
from tir_schedules.matmul.int4_matmul import int4_matmul
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul


def test_the_compiler_is_there():
    """`make test` installs it: without this, every test that needs it would be skipped unseen."""
    assert find_toolkit() is not None, "pip install 'sits_tvm[cuda]'"


HANDWRITTEN = r"""
#include <cstdint>
#include <mma.h>
extern "C" __global__ void __launch_bounds__(32) int4_mma_kernel(int* a, int* b, int n) {
  int c[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; i++)
    asm volatile("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
                 "{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]), "r"(a[i + 3]),
                   "r"(b[i]), "r"(b[i + 1]));
  b[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}
extern "C" __global__ void __launch_bounds__(1024) spill_kernel(const float* a, float* b) {
  float x[80];
  for (int i = 0; i < 80; i++) x[i] = a[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 80; i++) b[i * 1024 + threadIdx.x] = x[i] * x[(i * 31 + 7) % 80];
}
extern "C" __global__ void __launch_bounds__(32) copy_kernel(const uint4* a, uint4* b, short* c) {
  __shared__ uint4 s[32];
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = s[31 - threadIdx.x];
  c[threadIdx.x] += 1;
}
"""


@pytest.fixture(scope="module")
def linear():
    target = parse_target("cuda -arch=sm_90")
    load_tensor_intrinsics()
    with record_launches() as launches:
        executable = relax.build(Linear, target)
    return SimpleNamespace(executable=executable, target=target, launches=launches)


@pytest.fixture(scope="module")
def handwritten():
    code = compile_device_code(holding(HANDWRITTEN), "sm_90")
    return SimpleNamespace(code=code, **{kernel.name: kernel for kernel in code.kernels})


def test_ptxas_gets_the_options_that_tvm_gives_it_at_load():
    assert list(PTXAS_OPTIONS) == nvcc._ptxas_option_flags()


def test_launches_are_recorded_with_symbolic_extents(linear):
    gemm, softmax, transpose = (linear.launches[name] for name in sorted(linear.launches))
    assert gemm.grid[0] == "(n + 127) // 128"
    expected = Launch(("n",), ("256",), softmax.static_smem, 0, softmax.arguments)
    assert softmax == expected
    assert softmax.arguments[-1] == "n"
    assert transpose.block == ("1024",)
    assert gemm.dynamic_smem > 0 == transpose.dynamic_smem


def test_launches_say_for_which_rows(linear):
    assert {launch.condition for launch in linear.launches.values()} == {""}
    func = int4_matmul(None, 64, 2048, QuantSpec(group_size=32), "float32", "fragments")
    scheduled = TensorCoreMatmul().apply(func, linear.target, False).mod["main"]
    attributes = {"global_symbol": "main", "tirx.is_scheduled": True}
    with record_launches() as launches:
        tvm.compile(tvm.IRModule({"main": scheduled.with_attr(attributes)}), linear.target)
    conditions = list(dict.fromkeys(launches[name].condition for name in in_order(launches)))
    assert conditions == ["0 < m", "m == 1", "m <= 8", "m <= 16", "m <= 32", "m <= 256", "256 < m"]


def in_order(launches):
    return sorted(launches, key=lambda name: int(re.search(r"_kernel_?(\d*)$", name)[1] or 0))


@needs_nvcc
def test_report_describes_every_kernel(linear):
    report = Report(kernels=[Kernel("softmax", "dlight", "default"), Kernel("host_only", "", "")])
    cubins = check_device_code(linear.executable, linear.target, report, linear.launches)
    kernels = {kernel.name: kernel for kernel in report.kernels}
    assert set(kernels) == {*linear.launches, "host_only"}
    assert kernels["softmax_kernel"].family == "dlight"
    assert kernels["softmax_kernel"].sass["HMMA"] == 0
    gemm = kernels["matmul_kernel"]
    assert (gemm.grid, gemm.spills) == (linear.launches["matmul_kernel"].grid, 0)
    assert 0 < gemm.loop_sass["HMMA"] < gemm.sass["HMMA"] == text_counts(cubins[0])["HMMA"]
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)


def text_counts(cubin):
    """Opcode classes in a cubin, counted in the other format that nvdisasm writes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [find_toolkit().nvdisasm, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9]+)", text)
    return {name: names.count(name) for name in set(names)}


@needs_nvcc
def test_emulated_int4_mma_shows_as_a_call(handwritten):
    kernel = handwritten.int4_mma_kernel
    called = [name for name in kernel.loop_sass if name.startswith("CALL:")]
    assert len(called) == 1
    assert "sub_byte" in called[0]
    assert kernel.loop_sass["CALL"] == kernel.loop_sass[called[0]] > 0
    assert kernel.sass["IMMA"] == kernel.sass["IMMA.16832.S8.S8"] == 2


@needs_nvcc
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_int4_weights_bring_no_emulated_mma(dtype):
    mod = one_function(
        lambda bb, x, w: relax.op.matmul(x, bb.emit(relax.op.permute_dims(w))),
        relax.TensorType((tirx.Var("n", "int64"), 512), dtype),
        relax.TensorType((1024, 512), dtype),
        num_input=1,
    )
    config = Config(quant=QuantSpec(group_size=32, symmetric=False))
    report = sits_tvm.build(mod, "cuda -arch=sm_90", config=config).report
    kernels = [kernel for kernel in report.kernels if "int4_matmul" in kernel.name]
    assert kernels
    for kernel in kernels:
        assert kernel.sass["total"] > 0
        assert (kernel.sass["CALL"], kernel.spills) == (0, 0)
        assert not any("S4" in opcode for opcode in kernel.sass)


@needs_nvcc
def test_native_int4_mma_of_ampere_is_an_instruction():
    (kernel, *_) = [
        kernel
        for kernel in compile_device_code(holding(HANDWRITTEN), "sm_80").kernels
        if kernel.name == "int4_mma_kernel"
    ]
    assert kernel.sass["CALL"] == 0
    assert kernel.sass["IMMA.16864.S4.S4"] == kernel.sass["IMMA"] > 0


@needs_nvcc
def test_spills_registers_and_shared_memory_are_read(handwritten):
    assert handwritten.spill_kernel.spills > 0
    assert handwritten.spill_kernel.registers <= 65536 // 1024
    assert handwritten.spill_kernel.sass["STL"] > 0
    assert handwritten.copy_kernel.static_smem == 32 * 16
    assert handwritten.copy_kernel.spills == 0


@needs_nvcc
def test_wide_and_narrow_loads_are_told_apart(handwritten):
    sass = handwritten.copy_kernel.sass
    assert (sass["LDG.128"], sass["LDG.narrow"]) == (1, 1)


@needs_nvcc
def test_counts_agree_with_the_text_of_nvdisasm(handwritten):
    text = text_counts(handwritten.code.cubins[0])
    for name in ("IMMA", "LOP3", "CALL", "LDL", "STL"):
        ours = sum(kernel.sass[name] for kernel in handwritten.code.kernels)
        assert ours == text.get(name, 0), name


_SUMS = ", ".join(f"%{i}" for i in range(4))
WGMMA = rf"""
extern "C" __global__ void __launch_bounds__(128) wgmma_kernel(const int* a, float* b,
                                                               unsigned long long right) {{
  float d[4] = {{0, 0, 0, 0}};
  int x = a[threadIdx.x];
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{_SUMS}}}, {{%4, %4, %4, %4}},"
               " %5, 1, 1, 1, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(x), "l"(right));
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
  WAIT
  for (int i = 0; i < 4; i++) b[threadIdx.x * 4 + i] = d[i];
}}
"""
_WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");'


@pytest.mark.parametrize(("wait", "codes"), [(_WAIT, set()), ("", {"wgmma-serialized"})])
def test_products_of_warpgroups_that_wait_on_their_own_are_told(wait, codes):
    source = WGMMA.replace("WAIT", wait)
    with collect() as notes:
        code = compile_device_code(holding(source), "sm_90a")
    assert {(note.severity, note.code) for note in notes} == {("warning", one) for one in codes}
    assert code.kernels[0].sass["HGMMA"] == 1
    (candidate,) = compile_kernels(source, "sm_90a", find_toolkit())
    assert candidate.waits == len(codes)


def test_other_instruments_keep_running():
    import tvm

    seen = []

    @tvm.ir.instrument.pass_instrument
    class Names:
        def run_after_pass(self, _mod, info):
            seen.append(info.name)

    with tvm.transform.PassContext(opt_level=3, instruments=[Names()]), record_launches():
        assert tvm.transform.PassContext.current().opt_level == 3
        relax.transform.LegalizeOps()(Linear)
    assert "LegalizeOps" in seen
