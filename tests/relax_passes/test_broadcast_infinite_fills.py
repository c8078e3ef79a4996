"""BroadcastInfiniteFills: tensors of Inf and NaN compile; all others stay as they are."""

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import sits_tvm
from relax_passes.broadcast_infinite_fills import BroadcastInfiniteFills
from sits_tvm import Config

INF = float("inf")


def verify(before, expected):
    digest = tvm_ffi.structural_hash(before)
    assert_structural_equal(BroadcastInfiniteFills()(before), expected)
    assert tvm_ffi.structural_hash(before) == digest


def test_leaves_finite_numbers_and_run_time_values_alone():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, "n"), "float32"), v: R.Tensor((), "float32")):
            with R.dataflow():
                a = R.full_like(x, R.const(-3.4e38, "float32"))
                b = R.full_like(x, v)
                c = R.full(R.shape([3]), R.const(7, "int32"), "float32")
                R.output(a, b, c)
            return a, b, c

    verify(Before, Before)


def test_keeps_the_dtype_of_the_result():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, "n"), "float16")):
            with R.dataflow():
                y = R.full_like(x, R.const(float("inf"), "float32"))
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((4, "n"), "float16")):
            n = T.int64()
            with R.dataflow():
                y = R.broadcast_to(R.const(float("inf"), "float16"), R.shape([4, n]))
                R.output(y)
            return y

    verify(Before, Expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("number", [INF, -INF, float("nan")])
def test_same_numbers_as_torch(number, dtype):
    def body(bb, x):
        rows = bb.emit(relax.op.full_like(x, relax.const(number, dtype)))
        return bb.emit(relax.op.where(bb.emit(relax.op.isnan(x)), rows, x))

    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, tvm.tirx.Var("n", "int64")), dtype))
    with bb.function("main", [x]):
        bb.emit_func_output(body(bb, x))
    given = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan, 0.5, -3.0]]).to(getattr(torch, dtype))
    vm = relax.VirtualMachine(sits_tvm.build(bb.get(), "llvm"), tvm.cpu())
    got = vm["main"](tvm.runtime.from_dlpack(given))
    want = torch.where(given.isnan(), torch.full_like(given, number), given)
    assert torch.equal(torch.from_dlpack(got).nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("axis", [-1, -2], ids=["attention", "near miss"])
@pytest.mark.parametrize("config", [Config(attention="off"), Config(verify=True)], ids=str)
def test_causal_mask_of_infinity_that_is_added(config, axis):
    """triu(full(-inf), 1), where attention is not rewritten, and where it is run as written."""

    class Causal(torch.nn.Module):
        def forward(self, q, k, v):
            mask = torch.triu(torch.full((6, 6), -INF), 1)
            return torch.softmax(q @ k.mT + mask, axis) @ v

    torch.manual_seed(0)
    inputs = tuple(torch.randn(1, 2, 6, 8) for _ in range(3))
    mod, _ = sits_tvm.from_torch(Causal().eval(), inputs)
    executable = sits_tvm.build(mod, "llvm", config=config)
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](*(x.numpy() for x in inputs))
    np.testing.assert_allclose(got.numpy(), Causal()(*inputs), rtol=1e-5, atol=1e-6)
