"""BoundTakeIndices: NaN for an index outside, everything else as it was."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal

import sits_tvm
from relax_passes import BoundTakeIndices
from sits_tvm import Config, QuantSpec
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack


def take(table, indices, **options):
    bb = relax.BlockBuilder()
    arguments = [relax.Var("table", relax.TensorType(*table))]
    if not isinstance(indices, relax.Expr):
        indices = relax.Var("ids", relax.TensorType(*indices))
        arguments.append(indices)
    with bb.function("main", arguments):
        with bb.dataflow():
            out = bb.emit_output(relax.op.take(arguments[0], indices, **options))
        bb.emit_func_output(out)
    return bb.get()


FLOATS, IDS = ((5, 64), "float32"), ((4,), "int64")


@pytest.mark.parametrize(
    ("why", "mod"),
    [
        ("constants are checked elsewhere", take(FLOATS, relax.const([0, 4], "int64"), axis=0)),
        ("integers have no NaN", take(((5, 64), "int32"), IDS, axis=0)),
        ("the mode says what to do", take(FLOATS, IDS, axis=0, mode="clip")),
    ],
)
def test_leaves_alone(why, mod):
    assert_structural_equal(BoundTakeIndices()(mod), mod)


@pytest.mark.parametrize("quant", [None, QuantSpec(group_size=32)], ids=str)
def test_an_id_outside_the_table_gives_nan(rng, quant):
    """Also from a table in INT4."""
    mod = take(FLOATS, ((1, 4), "int64"), axis=0)
    mod["main"] = relax.Function(
        [mod["main"].params[1], mod["main"].params[0]],
        mod["main"].body,
        mod["main"].ret_ty,
        attrs=mod["main"].attrs,
    ).with_attr("num_input", 1)
    table = rng.standard_normal((5, 64)).astype("float32")
    config = Config(quant=quant, quantize_embedding=quant is not None)
    built = sits_tvm.build(mod, "llvm -mcpu=native", params={"table": table}, config=config)
    vm = relax.VirtualMachine(built, tvm.cpu())
    ids = np.array([[4, 5, -1, 1 << 40]])
    got = vm["main"](tvm.runtime.tensor(ids), *built.param_list).numpy()[0]
    assert np.isnan(got[1:]).all()
    if quant is not None:
        table = unpack(pack(table, quant), PackedLayout(5, 64, quant))
    np.testing.assert_array_equal(got[0], table[4])


def test_a_table_of_one_axis_needs_none_named():
    vm = relax.VirtualMachine(sits_tvm.build(take(((5,), "float32"), IDS), "llvm"), tvm.cpu())
    table = np.arange(5, dtype="float32")
    got = vm["main"](table, np.array([4, 0, 5, -1])).numpy()
    np.testing.assert_array_equal(got, [4, 0, np.nan, np.nan])
