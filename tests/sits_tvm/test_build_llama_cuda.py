"""A decoder for CUDA: each product with an INT4 weight is on tensor cores, its neighbours fused."""

import pytest
from cuda_sources import needs_nvcc

import sits_tvm
from sits_tvm import Config, QuantSpec
from tests.benchmarks import bench_compile

SMALL = {"HIDDEN": 128, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 32, "INNER": 320, "VOCABULARY": 96}


@pytest.fixture
def llama(monkeypatch):
    def make(sizes, dtype, batch, length):
        for name, value in sizes.items():
            monkeypatch.setattr(bench_compile, name, value)
        return bench_compile.llama(2, batch, length, dtype)

    return make


def check_families(kernels):
    products = {k.name: k.family for k in kernels if "int4_matmul" in k.name}
    assert set(products.values()) == {"TensorCoreMatmul"}
    assert any("silu_multiply" in name for name in products)
    assert sum("_add" in name for name in products) >= 2  # residuals, of two shapes
    alone = ("add", "multiply", "silu", "fused_silu", "dequantize")
    assert not [k.name for k in kernels if k.name.startswith(alone)]
    assert not [k.name for k in kernels if k.ranked == "fallback"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("batch", "length"), [("b", "s"), (1, 1), (2, 48)])
def test_every_product_of_a_small_model(llama, dtype, batch, length):
    config = Config(quant=QuantSpec(group_size=32), quantize_embedding=True, quantize_head=True)
    mod = llama(SMALL, dtype, batch, length)
    _, report = sits_tvm.lower(mod, "cuda -arch=sm_90", config=config)
    unused = 4 if length == 1 else 0  # q and k of one token
    assert len(report.quantized) == 16 - unused
    assert not report.skipped
    check_families(report.kernels)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_product_of_llama3(llama, dtype, group_size):
    mod = llama(bench_compile.LLAMA3, dtype, "b", "s")
    config = Config(quant=QuantSpec(group_size=group_size))
    report = sits_tvm.build(mod, "cuda -arch=sm_90", config=config).report
    assert len(report.quantized) == 14
    check_families(report.kernels)
    for kernel in report.kernels:
        if kernel.family == "TensorCoreMatmul":
            assert kernel.sass["CALL"] == 0
