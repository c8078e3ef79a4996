"""Device code that does not compile or does not fit: the error names the kernel and the remedy."""

import pytest
from cuda_sources import Linear, holding, needs_nvcc

import sits_tvm
from sits_tvm.device_code import Launch, check_launches, compile_device_code, require_toolkit
from sits_tvm.device_code.nvcc import compile_text
from sits_tvm.diagnostics import SitsError

BROKEN = r"""
#include <cuda_fp16.h>
extern "C" __global__ void good_kernel(half* a);
extern "C" __global__ void bad_kernel(half* a);
extern "C" __global__ void __launch_bounds__(32) good_kernel(half* a) {
  a[0] = hrint(a[0]);
}
extern "C" __global__ void __launch_bounds__(32) bad_kernel(half* a) {
  a[0] = hnearbyint(a[0]);
}
extern "C" __global__ void __launch_bounds__(32) worse_kernel(half* a) {
  a[0] = hsinh(a[0]);
}
"""


@needs_nvcc
def test_an_error_names_the_kernel_and_all_are_listed():
    with pytest.raises(SitsError) as caught:
        compile_device_code(holding(BROKEN), "sm_90")
    bad, worse = caught.value.diagnostics
    assert bad.code == worse.code == "device-code-invalid"
    assert (bad.function, worse.function) == ("bad", "worse")
    assert 'kernel bad_kernel does not compile: error: identifier "hnearbyint"' in bad.message
    assert (bad.ir, worse.ir) == ("a[0] = hnearbyint(a[0]);", "a[0] = hsinh(a[0]);")


@needs_nvcc
def test_says_that_the_text_cannot_be_written(tmp_path):
    with pytest.raises(SitsError, match=r"device-code-not-written.*none/kernels.cu"):
        compile_text(require_toolkit(), "sm_90", BROKEN, tmp_path / "none")


@needs_nvcc
def test_an_error_of_ptxas_names_the_kernel():
    source = """
extern "C" __global__ void first_kernel(int* a) {
  a[0] = 1;
}
extern "C" __global__ void second_kernel(int* a) {
  asm volatile("wgmma.fence.sync.aligned;");
}
"""
    with pytest.raises(SitsError) as caught:
        compile_device_code(holding(source), "sm_90")
    assert {problem.function for problem in caught.value.diagnostics} == {"second"}
    assert "wgmma.fence" in caught.value.diagnostics[0].message
    assert caught.value.diagnostics[0].ir == "wgmma.fence.sync.aligned;"


@needs_nvcc
def test_too_much_static_shared_memory_names_the_kernel():
    source = """
extern "C" __global__ void big_kernel(int* a) {
  __shared__ int s[20000];
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = s[31 - threadIdx.x];
}
"""
    with pytest.raises(SitsError) as caught:
        compile_device_code(holding(source), "sm_90")
    assert caught.value.diagnostics[0].function == "big"


def test_launches_beyond_the_hardware_are_refused_before_nvcc():
    launches = {
        "static_kernel": Launch(("n",), ("32",), 49153, 0),
        "dynamic_kernel": Launch(("n",), ("32",), 0, 232449),
        "threads_kernel": Launch(("n",), ("64", "32"), 0, 0),
        "fine_kernel": Launch(("n",), ("64", "16"), 49152, 232448),
        "symbolic_kernel": Launch(("n",), ("n",), 0, "n * 4"),
    }
    with pytest.raises(SitsError) as caught:
        check_launches(launches, "sm_90a")
    found = {problem.function: problem.message for problem in caught.value.diagnostics}
    assert set(found) == {"static", "dynamic", "threads"}
    assert "49153 bytes of static shared memory, more than the 49152" in found["static"]
    assert "232448 of sm_90a" in found["dynamic"]
    assert "2048 threads" in found["threads"]


def test_without_nvcc_a_build_stops_first_with_the_remedy(monkeypatch):
    monkeypatch.setattr("sits_tvm.device_code.check.find_toolkit", lambda: None)
    monkeypatch.setattr("sits_tvm.driver.run_graph_passes", None)  # would be called next
    with pytest.raises(SitsError, match="nvcc-missing") as caught:
        sits_tvm.build(Linear, "cuda -arch=sm_90")
    assert "pip install 'sits_tvm[cuda]'" in caught.value.diagnostics[0].help
