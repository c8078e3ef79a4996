"""build: errors that name what is wrong with a module, its parameters or its target."""

import numpy as np
import pytest
import torch
import tvm
from small_builds import CPU, G32, MATRIX, QUANT, codes, refused
from small_modules import Mlp, mlp_params, one_function
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import sits_tvm
from sits_tvm import Config


@pytest.mark.parametrize("value", [-1, 3, "1", 1.0])
def test_refuses_a_num_input_that_counts_no_arguments(value):
    mod = one_function(lambda bb, x, w: relax.op.matmul(x, w), MATRIX, MATRIX)
    mod["main"] = mod["main"].with_attr("num_input", value)
    (found,) = refused(mod, CPU)
    assert found.code == "num-input"
    assert repr(value) in found.message


def test_refuses_a_local_function():
    @I.ir_module
    class Closure:
        @R.function
        def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
            @R.function
            def inner(y: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
                z = R.matmul(y, w)
                return z

            out = inner(x)
            return out

    assert codes(refused(Closure, CPU)) == ["local-function"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_refuses_rms_norm_over_all_axes(dtype):
    """TVM's kernel for it reads a number as a vector."""
    row = relax.TensorType([8], dtype)
    mod = one_function(lambda bb, x, w: bb.emit(relax.op.nn.rms_norm(x, w, -1)), row, row)
    (found,) = refused(mod, CPU)
    assert (found.code, found.function) == ("rms-norm-axes", "main")
    assert "R.expand_dims" in found.help


def test_refuses_a_public_function_that_fusion_would_make_a_kernel_of():
    mod = one_function(lambda bb, x, w: relax.op.matmul(x, w), MATRIX, MATRIX)
    mod["main"] = mod["main"].with_attr("Primitive", True)
    assert codes(refused(mod, CPU)) == ["primitive-function"]


def test_refuses_a_tuple_among_the_params():
    pair = relax.TupleType([MATRIX, MATRIX])
    mod = one_function(
        lambda bb, x, w: relax.op.matmul(x, bb.emit(w[0])), MATRIX, pair, num_input=1
    )
    (found,) = refused(mod, CPU, params={"a1": np.zeros((64, 64), "float32")})
    assert found.code == "params-mismatch"
    assert "Tuple" in found.message


@pytest.mark.parametrize("mod", [None, "model.onnx", 3])
def test_refuses_what_is_no_module(mod):
    (found,) = refused(mod, CPU)
    assert found.code == "not-a-module"
    assert type(mod).__name__ in found.message


def test_refuses_a_module_without_a_public_function():
    @I.ir_module(s_tir=True)
    class OnlyTir:
        @T.prim_func(s_tir=True, private=True)
        def kernel(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("copy"):
                    v = T.axis.spatial(4, i)
                    y[v] = x[v]

    for mod in (OnlyTir, tvm.IRModule({})):
        (found,) = refused(mod, CPU)
        assert found.code == "no-public-function"


def test_refuses_quant_with_nothing_to_quantize():
    mod = one_function(lambda bb, x: relax.op.add(x, x), MATRIX)
    found = refused(mod, CPU, config=QUANT)
    assert codes(found) == ["nothing-to-quantize"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_weights_that_are_not_finite_all_at_once(rng, bad):
    params = mlp_params(rng)
    params["up"][3, 5] = params["down"][1, 1] = bad
    found = refused(Mlp, CPU, params=params, config=QUANT)
    assert codes(found) == ["weight-not-quantizable"] * 2
    assert ["up" in found[0].message, "down" in found[1].message] == [True, True]


def test_refuses_one_name_for_packed_codes_and_for_a_weight():
    mod = one_function(lambda bb, x, w: relax.op.matmul(x, w), MATRIX, MATRIX, num_input=1)
    bb, x, taken = relax.BlockBuilder(), relax.Var("x", MATRIX), relax.Var("a1.codes", MATRIX)
    with bb.function("other", [x, taken], attrs={"num_input": 1}):
        bb.emit_func_output(bb.emit(relax.op.add(x, taken)))
    mod["other"] = bb.get()["other"]
    params = {name: np.ones((64, 64), "float32") for name in ("a1", "a1.codes")}
    (found,) = refused(mod, CPU, params=params, config=QUANT)
    assert found.code == "name-taken"
    assert "`a1.codes` of " in found.message


def test_refuses_params_that_do_not_fit(rng):
    params = mlp_params(rng)
    del params["bias"]
    params["up"] = params["up"][:, :32]
    params["down"] = params["down"].astype("float16")
    params["dwon"] = params["up"]
    found = refused(Mlp, CPU, params=params)
    assert codes(found) == [
        "params-mismatch",
        "params-missing",
        "params-mismatch",
        "params-unknown",
    ]
    assert "(128, 32)" in found[0].message
    assert "float16" in found[2].message
    assert found[3].help == "did you mean `down`?"


def test_refuses_params_before_inputs(rng):
    mod = one_function(lambda bb, w, x: relax.op.matmul(x, w), MATRIX, MATRIX)
    (found,) = refused(mod, CPU, params={"a0": np.zeros((64, 64), "float32")})
    assert found.code == "params-before-inputs"


def test_refuses_a_param_that_is_no_tensor(rng):
    (found,) = refused(Mlp, CPU, params={**mlp_params(rng), "bias": [0.0] * 128})
    assert found.code == "params-type"
    assert "`bias`" in found.message


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "NoneType"),
        ("up", "str"),
        (torch.zeros(128, device="meta"), "meta"),
        (torch.zeros(128).to_sparse(), "strided"),
    ],
)
def test_says_what_a_param_is(rng, value, reason):
    found = refused(Mlp, CPU, params={**mlp_params(rng), "bias": value})
    assert codes(found) == ["params-type"]
    assert "`bias`" in found[0].message
    assert reason in found[0].message


def test_refuses_params_and_config_of_another_type(rng):
    params = mlp_params(rng)
    assert codes(refused(Mlp, CPU, params=list(params.values()))) == ["params-type"]
    assert codes(refused(Mlp, CPU, params={**params, 0: params["up"]})) == ["params-type"]
    assert codes(refused(Mlp, CPU, params=params, config=G32)) == ["config"]
    (found,) = refused(Mlp, CPU, config=Config(dump_dir="/proc/self/none"))
    assert found.code == "dump-dir"


def test_refuses_int4_tensors_by_name():
    mod = one_function(
        lambda bb, x: relax.op.astype(bb.emit(relax.op.astype(x, "int4")), "float32"), MATRIX
    )
    found = refused(mod, CPU)
    assert all("int4" in diagnostic.message for diagnostic in found)


@pytest.mark.parametrize("target", ["cuda", "cuda -arch=sm_9999", "llvm -mcpu=bogus", "lvm", 7])
def test_refuses_targets_by_value(target):
    found = refused(Mlp, target)
    assert str(target).rpartition("=")[2] in " ".join(d.message for d in found)


def test_warns_of_a_target_that_this_machine_cannot_run():
    report = sits_tvm.build(Mlp, {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}).report
    assert "target-not-this-machine" in codes(report.diagnostics)
