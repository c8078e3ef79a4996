"""Attention of an imported model in device code for sm_90, as the report shows it."""

import pytest
import torch
from cuda_sources import needs_nvcc

import sits_tvm
from sits_tvm import from_torch

pytestmark = needs_nvcc


class Hidden(torch.nn.Module):
    """A Llama of one layer, 4 heads of 16 and 2 of keys and values, up to its last states."""

    def __init__(self):
        import transformers

        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, **heads, vocab_size=64)
        self.model = transformers.LlamaModel(config)
        self.model.set_attn_implementation("sdpa")

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False, return_dict=False)[0]


class Grouped(torch.nn.Module):
    """Four heads of 16 over two of keys and values."""

    def forward(self, q, k, v):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def model(dtype):
    torch.manual_seed(0)
    module, ids = Hidden().eval().to(dtype), torch.arange(18).reshape(2, 9)
    return from_torch(module, (ids,), dynamic_shapes={"ids": {1: torch.export.Dim("s", max=64)}})


def module(dtype):
    inputs = [torch.randn(2, heads, 9, 16, dtype=dtype) for heads in (4, 2, 2)]
    length = {2: torch.export.Dim("s", max=64)}
    return from_torch(Grouped(), inputs, dynamic_shapes={name: length for name in "qkv"})


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (module, torch.float16),
        pytest.param(model, torch.float16, marks=pytest.mark.slow),
        pytest.param(model, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_fused_kernel_is_in_the_report(make, dtype):
    mod, params = make(dtype)
    report = sits_tvm.build(mod, "cuda -arch=sm_90", params=params).report
    (kernel,) = [kernel for kernel in report.kernels if kernel.name == "attention_kernel"]
    assert not [note for note in report.diagnostics if note.code == "attention-plain"]
    assert not [kernel for kernel in report.kernels if "softmax" in kernel.name]
    products = "HMMA" if dtype == torch.float16 else "FFMA"
    assert kernel.sass[products] >= 16
    assert (kernel.spills, kernel.sass["LDL"], kernel.sass["STL"]) == (0, 0, 0)
    assert kernel.dynamic_smem == (64 + 64 + 64) * (16 * dtype.itemsize + 16)
    assert kernel.grid == ("max((num_queries + 31) // 32, 1) * 4",)
    (line,) = [line for line in str(report).splitlines() if line.startswith("attention_kernel ")]
    cells = line.split()
    assert {str(kernel.registers), str(kernel.dynamic_smem)} <= set(cells)
    assert f"{products}={kernel.sass[products]}" in cells
