"""Builds for CUDA hold INT4 weights in the order that its tensor cores read."""

import numpy as np
import pytest
import tvm
from small_builds import G32, QUANT
from small_modules import Mlp, mlp_params, one_function, restored
from tvm import relax

import sits_tvm
from relax_passes import QuantizeMatmulWeights
from sits_tvm import Config, QuantSpec
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import PackedLayout, unpack

TIED = {"quantize_embedding": True, "quantize_head": True}
IDS, TABLE = relax.TensorType((3,), "int64"), relax.TensorType((40, 96), "float32")


def tied():
    """main(a0 (3,), a1 (40, 96)): rows of a table, and the logits of these rows by the table."""

    def make(bb, ids, table):
        rows = bb.emit(relax.op.take(table, ids, axis=0))
        return relax.op.matmul(rows, bb.emit(relax.op.permute_dims(table)))

    return one_function(make, IDS, TABLE, num_input=1)


@pytest.mark.parametrize(("arch", "order"), [("sm_75", "rows"), ("sm_90", "fragments")])
def test_packed_for_the_target(rng, arch, order):
    params = mlp_params(rng)
    built = sits_tvm.build(Mlp, f"cuda -arch={arch}", params=params, config=QUANT)
    for name, weight in {"up": params["up"], "down": params["down"].T}.items():
        layout = PackedLayout(*weight.shape, G32, order)
        parts = tuple(built.params[f"{name}.{part}"].numpy() for part in layout.names)
        assert tuple(part.shape for part in parts) == layout.shapes
        np.testing.assert_array_equal(unpack(parts, layout), restored(weight, G32))


def test_a_tied_table_is_packed_once(rng):
    params = {"a1": rng.standard_normal((40, 96)).astype("float32")}
    config = Config(quant=G32, **TIED)
    built = sits_tvm.build(tied(), "cuda -arch=sm_90", params=params, config=config)
    assert list(built.params) == ["a1.codes", "a1.scale", "a1.zero_point"]
    assert tuple(built.params["a1.codes"].shape) == (3, 2, 128)


@pytest.mark.parametrize("activation", [None, "int8", "int4"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_tied_table_has_the_same_values_in_every_order(rng, order, activation):
    """Packed by the compiled program and read by both kernels, unscheduled, on this CPU."""
    spec = QuantSpec(group_size=32, symmetric=False, activation=activation)
    packed = QuantizeMatmulWeights(Config(quant=spec, **TIED), order=order)(tied())
    vm = relax.VirtualMachine(tvm.compile(packed, "llvm"), tvm.cpu())
    table = rng.standard_normal((40, 96)).astype("float32")
    parts = vm["main_transform_params"]([tvm.runtime.tensor(table)])
    got = vm["main"](tvm.runtime.tensor(np.array([7, 0, 39])), *parts).numpy()
    weight = restored(table, G32)
    want = weight[[7, 0, 39]] @ weight.T
    steps = {None: 0, "int8": np.abs(weight).max() / 254, "int4": np.abs(weight).max() / 14}
    step = steps[activation] * np.abs(weight).sum(-1)
    assert (np.abs(got - want) <= step + 2e-6 * np.abs(want).max()).all()
