import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.relax import op as R

from relax_passes.widen_bfloat16_ops import WidenBfloat16Ops

SHAPE = (4, 16)


def module(call, count=1, dtype="bfloat16", shape=SHAPE):
    bb = relax.BlockBuilder()
    args = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i in range(count)]
    with bb.function("main", args):
        with bb.dataflow():
            out = bb.emit_output(call(*args))
        bb.emit_func_output(out)
    return bb.get()


def ones(shape):
    return relax.const(np.ones(shape, ml_dtypes.bfloat16))


def layer_norm(x):
    return R.nn.layer_norm(x, ones(16), ones(16), axes=[-1])


def instance_norm(x):
    return R.nn.instance_norm(x, ones(4), ones(4), channel_axis=1, axes=[2])


def torch_instance_norm(x):
    weight = torch.ones(4, dtype=x.dtype)
    return torch.nn.functional.instance_norm(x, weight=weight, bias=weight)


CASES = {
    "layer_norm": (layer_norm, lambda x: torch.layer_norm(x, (16,)) + 1, 1),
    "instance_norm": (instance_norm, torch_instance_norm, 1),
    "power": (R.power, torch.pow, 2),
    "log_add_exp": (R.log_add_exp, torch.logaddexp, 2),
    "isnan": (R.isnan, torch.isnan, 1),
    "isinf": (R.isinf, torch.isinf, 1),
    "isfinite": (R.isfinite, torch.isfinite, 1),
    "argmax": (lambda x: R.argmax(x, axis=-1), lambda x: torch.argmax(x, -1), 1),
    "argmin": (lambda x: R.argmin(x, axis=-1), lambda x: torch.argmin(x, -1), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name, rng):
    call, oracle, count = CASES[name]
    shape = (2, 4, 8) if name == "instance_norm" else SHAPE
    mod = WidenBfloat16Ops()(module(call, count, shape=shape))
    args = [rng.uniform(0.1, 3, shape).astype(ml_dtypes.bfloat16) for _ in range(count)]
    if name.startswith("is"):
        args[0][0, :3] = [np.nan, np.inf, -np.inf]
    vm = relax.VirtualMachine(relax.build(mod, "llvm"), tvm.cpu())
    out = vm["main"](*map(tvm.runtime.tensor, args)).numpy().astype("float64")
    expected = oracle(*(torch.from_numpy(x.astype("float64")) for x in args)).numpy()
    assert np.allclose(out, expected, rtol=2.0**-8, atol=2.0**-9)


@pytest.mark.parametrize("name", CASES)
def test_result_keeps_its_type(name):
    call, _, count = CASES[name]
    shape = (2, 4, 8) if name == "instance_norm" else SHAPE
    before = module(call, count, shape=shape)
    digest = tvm_ffi.structural_hash(before)
    after = WidenBfloat16Ops()(before)
    assert_structural_equal(after["main"].ret_ty, before["main"].ret_ty)
    assert tvm_ffi.structural_hash(before) == digest != tvm_ffi.structural_hash(after)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_leaves_other_types_alone(dtype):
    mod = module(R.power, 2, dtype)
    assert_structural_equal(WidenBfloat16Ops()(mod), mod)


def test_leaves_other_ops_in_bfloat16():
    mod = module(R.add, 2)
    assert_structural_equal(WidenBfloat16Ops()(mod), mod)


def test_a_matmul_reads_its_operands_as_they_are():
    """A copy of the weight in float32 would cost three times the memory traffic."""
    mod = WidenBfloat16Ops()(module(R.matmul, 2, shape=(16, 16)))
    product, rounded = (b.value for b in mod["main"].body.blocks[0].bindings)
    assert list(product.args) == list(mod["main"].params)
    assert (str(product.ty.dtype), str(rounded.ty.dtype)) == ("float32", "bfloat16")


def test_tuples_keep_their_types():
    """topk returns a value in bfloat16 and an index; einsum takes a tuple."""
    topk = module(lambda x: R.topk(x, 2, -1))
    assert_structural_equal(WidenBfloat16Ops()(topk)["main"].ret_ty, topk["main"].ret_ty)
    einsum = module(lambda x, y: R.einsum((x, y), "ij,ij->i"), 2)
    assert "float32" in str(WidenBfloat16Ops()(einsum))
