"""QuantizeMatmulWeights: weights that several products, functions or branches read."""

import numpy as np
import pytest
import tvm
from quantized_matmul import G32, MATRIX, OP, module_of, quantize, stored
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import sits_tvm
from sits_tvm import Config


def test_one_weight_read_twice_is_packed_once():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                wt = R.permute_dims(w)
                h = R.matmul(x, wt)
                y = R.matmul(h, wt)
                R.output(y)
            return y

    after, _, report = quantize(Before)
    assert len(report.quantized) == 1
    assert [argument.name for argument in after["main"].params] == ["x", "w.codes", "w.scale"]


def test_weight_that_is_also_an_output_stays():
    """A caller who gets W back must get the float W."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                h = R.matmul(x, w)
                y = (h, w)
                R.output(y)
            return y

    after, _, _ = quantize(Before)
    assert [argument.name for argument in after["main"].params] == ["x", "w", "w.codes", "w.scale"]


def test_two_functions_share_a_weight():
    bb = relax.BlockBuilder()
    for name, rows in (("prefill", 8), ("decode", 1)):
        x = relax.Var("x", relax.TensorType((rows, 64), "float32"))
        w = relax.Var("w", MATRIX)
        with bb.function(name, [x, w], attrs={"num_input": 1}):
            with bb.dataflow():
                out = bb.emit_output(OP.matmul(x, w))
            bb.emit_func_output(out)
    after, _, report = quantize(bb.get())
    assert sorted(v.name_hint for v in after.get_global_vars()) == [
        "decode",
        "decode_transform_params",
        "prefill",
        "prefill_transform_params",
    ]
    assert sorted(row.function for row in report.quantized) == ["decode", "prefill"]


@pytest.mark.parametrize("n", [64, 96])
def test_a_weight_read_both_ways_is_packed_for_each(n, rng):
    """A tied autoencoder: the groups of the second product lie along the other axis."""
    mod = module_of(
        relax.TensorType((n, 64), "float32"),
        lambda bb, x, w: OP.matmul(bb.emit(OP.matmul(x, bb.emit(OP.permute_dims(w)))), w),
    )
    w, x = (rng.standard_normal(shape).astype("float32") for shape in ((n, 64), (4, 64)))
    executable = sits_tvm.build(
        mod, "llvm -mcpu=native", params={"a1": w}, config=Config(quant=G32)
    )
    assert [row.shape for row in executable.report.quantized] == [(n, 64), (64, n)]
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](x, *executable.param_list).numpy()
    want = x @ stored(w).T @ stored(w.T).T
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_functions_that_read_a_weight_in_two_ways_get_parts_of_their_own(rng):
    bb = relax.BlockBuilder()
    for name, turn in (("straight", OP.permute_dims), ("turned", OP.astype)):
        x, w = (relax.Var(v, MATRIX) for v in "xw")
        with bb.function(name, [x, w], attrs={"num_input": 1}):
            with bb.dataflow():
                turned = bb.emit(turn(w, None if turn is OP.permute_dims else "float32"))
                out = bb.emit_output(OP.matmul(x, turned))
            bb.emit_func_output(out)
    w, x = (rng.standard_normal((64, 64)).astype("float32") for _ in range(2))
    built = sits_tvm.build(bb.get(), "llvm -mcpu=native", params={"w": w}, config=Config(quant=G32))
    vm = relax.VirtualMachine(built, tvm.cpu())
    for name, want in (("straight", x @ stored(w).T), ("turned", x @ stored(w.T).T)):
        got = vm[name](x, *built.params_for(name)).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@I.ir_module
class Branches:
    """Products in branches and after them, and no dataflow block."""

    @R.function
    def main(
        c: R.Tensor((), "bool"),
        x: R.Tensor(("s", 64), "float32"),
        w: R.Tensor((64, 64), "float32"),
        v: R.Tensor((64, 64), "float32"),
    ) -> R.Tensor(("s", 64), "float32"):
        R.func_attr({"num_input": 2})
        s = T.int64()
        if c:
            y: R.Tensor((s, 64), "float32") = R.matmul(x, R.permute_dims(w))
            z: R.Tensor((s, 64), "float32") = y
        else:
            y2: R.Tensor((s, 64), "float32") = R.matmul(x, R.permute_dims(v))
            z: R.Tensor((s, 64), "float32") = y2
        u = R.matmul(z, R.permute_dims(w))
        return u


def test_reaches_into_branches(rng):
    params = {name: rng.standard_normal((64, 64)).astype("float32") for name in "wv"}
    x = rng.standard_normal((3, 64)).astype("float32")
    config = Config(quant=G32)
    built = sits_tvm.build(Branches, "llvm -mcpu=native", params=params, config=config)
    assert [row.name for row in built.report.quantized] == ["w", "v"]
    vm = relax.VirtualMachine(built, tvm.cpu())
    for condition, name in ((True, "w"), (False, "v")):
        want = x @ stored(params[name]).T @ stored(params["w"]).T
        got = vm["main"](np.array(condition), x, *built.param_list).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
