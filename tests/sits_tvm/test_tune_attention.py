"""`tune` of a module with attention and a product: both are tasks, and a build is right with both
records."""

import numpy as np
import pytest
import torch
from small_builds import run
from small_modules import one_function, restored
from test_tune_measured import assert_finds_an_error
from tvm import relax

import sits_tvm
from relax_passes.op import attention
from sits_tvm import Config, QuantSpec, from_torch, tune
from sits_tvm.driver import unscheduled
from sits_tvm.tuning.tasks import find_tasks

HOST = "llvm -mcpu=native -num-cores=2"
SPEC = QuantSpec(group_size=32)


class Block(torch.nn.Module):
    """Queries of 4 heads from one projection, keys and values of 2 heads as they come."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x, k, v):
        q = self.project(x).unflatten(2, (4, 16)).transpose(1, 2)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval()


def inputs():
    return torch.randn(1, 9, 64), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)


def test_tunes_attention_beside_a_product(block, tmp_path):
    arguments = inputs()
    mod, params = from_torch(block, arguments)
    found = find_tasks(*unscheduled(mod, HOST, params=params, config=Config(quant=SPEC)))
    buckets = {str(task.workload): (task.bucket,) for task in found}
    product, attend = "int4_matmul 64x64 g32 float32", "attention 4/2x16 float32 causal"
    assert buckets.keys() == {product, attend}
    printed = []
    database = tune(
        mod, HOST, params=params, config=Config(quant=SPEC),
        trials=2, work_dir=tmp_path, progress=printed.append,
    )  # fmt: skip
    assert sum("2 trials" in line and "failed" not in line for line in printed) == 2
    config = Config(quant=SPEC, database=database)
    built = sits_tvm.build(mod, HOST, params=params, config=config)
    ranked = {kernel.family: (kernel.ranked, kernel.tuned_rows) for kernel in built.report.kernels}
    assert ranked["Matmul"] == ("tuned", buckets[product])
    assert ranked["Attention"] == ("tuned", buckets[attend])
    weight = restored(block.project.weight.detach().numpy(), SPEC)
    block.double().project.weight.data = torch.tensor(weight, dtype=torch.float64)
    expected = block(*(x.double() for x in arguments)).detach().numpy()
    np.testing.assert_allclose(run(built, *arguments), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("queries", "bias", "options"),
    [(1, None, {}), (5, "bool", {}), (5, "bool", {"causal": "bottom_right", "window": 1})],
)
def test_a_wrong_result_is_a_failure(dtype, queries, bias, options):
    """Also of the narrow types, which NumPy does not all know, and where a query sees one key."""
    shapes = (1, 4, queries, 16), (1, 2, 70, 16), (1, 2, 70, 24), (queries, 70)
    types = [relax.TensorType(shape, dtype) for shape in shapes[:3]]
    types += [relax.TensorType(shapes[3], bias)] if bias else []
    mod = one_function(lambda bb, *xs: bb.emit(attention(*xs, softcap=5.0, **options)), *types)
    (task,) = find_tasks(*unscheduled(mod, HOST, config=Config()))
    assert_finds_an_error(task)


def test_a_build_without_int4_has_attention_to_tune(block):
    mod, params = from_torch(block, inputs())
    (task,) = find_tasks(*unscheduled(mod, HOST, params=params, config=Config()))
    assert task.workload.family == "attention"
    config = Config(attention="off")
    assert not find_tasks(*unscheduled(mod, HOST, params=params, config=config))
