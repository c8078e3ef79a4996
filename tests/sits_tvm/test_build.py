"""build, lower and check: numbers, reports, and errors that name what is wrong."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from small_modules import (
    Mlp,
    mlp_params,
    mlp_reference,
    one_function,
    restored,
    without_num_input,
)
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import sits_tvm
from sits_tvm import Config, QuantSpec, Report, SitsError
from sits_tvm.params import as_arrays
from sits_tvm.pipeline import lower_to_vm

CPU = "llvm -mcpu=native"
G32 = QuantSpec(group_size=32, symmetric=False)
QUANT = Config(quant=G32)
MATRIX = relax.TensorType((64, 64), "float32")


def codes(diagnostics):
    return [diagnostic.code for diagnostic in diagnostics]


def refused(*args, **options):
    with pytest.raises(SitsError) as raised:
        sits_tvm.build(*args, **options)
    return raised.value.diagnostics


def run(executable, *inputs, function="main"):
    vm = relax.VirtualMachine(executable, tvm.cpu())
    return vm[function](*inputs, *executable.params_for(function)).numpy()


@pytest.mark.parametrize("quant", [None, G32, QuantSpec(group_size=-1)], ids=str)
def test_right_for_every_batch_and_length(rng, quant):
    params = mlp_params(rng)
    executable = sits_tvm.build(Mlp, CPU, params=params, config=Config(quant=quant))
    vm = relax.VirtualMachine(executable, tvm.cpu())
    for shape in ((1, 1), (1, 7), (3, 16), (2, 0)):
        x = rng.standard_normal((*shape, 64)).astype("float32")
        got = vm["main"](tvm.runtime.tensor(x), *executable.param_list).numpy()
        want = mlp_reference(x, params, quant)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max(initial=1))


@pytest.mark.parametrize("given", ["numpy", "torch", "tvm"])
def test_takes_tensors_of_any_library(rng, given):
    params = mlp_params(rng)
    make = {"numpy": np.asarray, "torch": torch.from_numpy, "tvm": tvm.runtime.tensor}[given]
    executable = sits_tvm.build(Mlp, CPU, params={k: make(v) for k, v in params.items()})
    x = rng.standard_normal((1, 3, 64)).astype("float32")
    want = mlp_reference(x, params)
    np.testing.assert_allclose(run(executable, x), want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_does_not_change_its_input(rng):
    digest, params = tvm_ffi.structural_hash(Mlp), mlp_params(rng)
    before = {name: value.copy() for name, value in params.items()}
    sits_tvm.build(Mlp, CPU, params=params, config=QUANT)
    assert tvm_ffi.structural_hash(Mlp) == digest
    for name, value in params.items():
        np.testing.assert_array_equal(value, before[name])


def test_params_mark_weights_where_num_input_is_missing(rng):
    params = mlp_params(rng)
    executable = sits_tvm.build(without_num_input(Mlp), CPU, params=params, config=QUANT)
    assert [row.name for row in executable.report.quantized] == ["up", "down"]
    x = rng.standard_normal((1, 2, 64)).astype("float32")
    want = mlp_reference(x, params, G32)
    np.testing.assert_allclose(run(executable, x), want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_without_params_the_executable_packs_them_itself(rng):
    params = mlp_params(rng)
    config = Config(quant=G32)
    built = sits_tvm.build(Mlp, CPU, config=config)
    vm = relax.VirtualMachine(built, tvm.cpu())
    packed = vm["main_transform_params"]([tvm.runtime.tensor(value) for value in params.values()])
    expected = sits_tvm.build(Mlp, CPU, params=params, config=config).param_list
    for ours, theirs in zip(packed, expected, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    with pytest.raises(KeyError, match=r"built without parameters.*main_transform_params"):
        _ = built.param_list


def test_reports_what_it_did(rng):
    report = sits_tvm.build(Mlp, CPU, params=mlp_params(rng), config=QUANT).report
    assert [(row.name, row.shape) for row in report.quantized] == [
        ("up", (128, 64)),
        ("down", (64, 128)),
    ]
    assert report.skipped == []
    assert {"Matmul", "CpuFallback"} == {kernel.family for kernel in report.kernels}
    names = [run.name for run in report.passes]
    assert (
        names.index("QuantizeMatmulWeights")
        < names.index("LegalizeOps")
        < names.index("ApplySchedules")
    )
    changed = {run.name for run in report.passes if run.changed}
    assert "QuantizeMatmulWeights" in changed
    assert "LowerAttention" not in changed
    assert Report.from_json(report.to_json()) == report


def test_lower_stops_before_code_generation():
    lowered, report = sits_tvm.lower(Mlp, CPU, config=QUANT)
    functions = {v.name_hint: f for v, f in lowered.functions_items()}
    assert {"main", "main_transform_params"} <= set(functions)
    kernels = [f for f in functions.values() if isinstance(f, tirx.PrimFunc)]
    assert kernels
    assert all(f.attrs["tirx.is_scheduled"] for f in kernels if f.attrs["sits.rule"] != "none")
    assert len(kernels) == len(report.kernels)


@pytest.mark.parametrize("target", [CPU, "cuda -arch=sm_90"])
def test_reshapes_are_views(target):
    """Scheduled before TVM looks for them, they would be copied by kernels of their own."""

    def make(bb, x):
        rows = bb.emit(relax.op.nn.softmax(x))
        return relax.op.nn.softmax(bb.emit(relax.op.reshape(rows, (8, 8, 64))))

    report = sits_tvm.build(one_function(make, MATRIX), target).report
    assert not [kernel.name for kernel in report.kernels if "reshape" in kernel.name]


def test_no_kernel_holds_a_whole_float_weight():
    """INT4 kernels read codes and allocate less than a weight; Relax plans no room for one."""
    rows = relax.TensorType((tirx.Var("s", "int64"), 256), "float32")
    weight = relax.TensorType((256, 1024), "float32")
    mod = one_function(lambda bb, x, w: relax.op.matmul(x, w), rows, weight, num_input=1)
    lowered, _ = sits_tvm.lower(
        mod, CPU, params={"a1": np.ones((256, 1024), "float32")}, config=QUANT
    )
    (kernel,) = (f for v, f in lowered.functions_items() if "int4" in v.name_hint)
    assert "uint32" in [str(p.ty.dtype) for p in kernel.params]
    assert 0 < max(allocated_elements(kernel)) <= 256 * 1024 // 8
    target = sits_tvm.parse_target(CPU)
    planned = lower_to_vm(target)(lowered)["main"].script()
    assert "alloc_storage" in planned or "alloc_tensor" in planned
    assert not re.findall(r"R\.shape\(\[(?:1048576|256, 1024|1024, 256)\]\)", planned)


def allocated_elements(kernel):
    """Elements of every buffer that a kernel allocates, as its script shows them."""
    allocations = re.findall(r"alloc_\w+\(\((.*)", kernel.script())
    return [math.prod(map(int, re.findall(r"int64\((\d+)\)", text))) for text in allocations]


PEAK = """
import gc
import numpy as np
import tvm
from tvm import relax
import sits_tvm

def now():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

def rss():  # the peak of this process; ru_maxrss starts at that of the one that started it
    with open("/proc/self/status") as status:
        return 1024 * int(next(line.split()[1] for line in status if line.startswith("VmHWM")))

def products(n, layers):
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, n), "float32"))
    weights = [relax.Var(f"w{i}", relax.TensorType((n, n), "float32")) for i in range(layers)]
    with bb.function("main", [x, *weights], attrs={"num_input": 1}):
        with bb.dataflow():
            y = x
            for weight in weights:
                y = bb.emit(relax.op.matmul(y, weight))
            y = bb.emit_output(y)
        bb.emit_func_output(y)
    return bb.get(), {f"w{i}": np.full((n, n), 0.5, "float32") for i in range(layers)}

def build(mod, params):
    quant = sits_tvm.QuantSpec(group_size=32, symmetric=False)
    config = sits_tvm.Config(quant=quant)
    return sits_tvm.build(mod, "llvm -mcpu=native", params=params, config=config)

build(*products(64, 8))  # code that stays loaded
mod, params = products(2048, 8)
gc.collect()
before = rss()
executable = build(mod, params)
print((rss() - before) / (8 * 2048 * 2048 * 4))

del params
vm = relax.VirtualMachine(executable, tvm.cpu())
gc.collect()
x = tvm.runtime.tensor(np.ones((1, 2048), "float32"))
before = now()
for _ in range(3):
    vm["main"](x, *executable.param_list)
print((now() - before) / (2048 * 2048 * 4))
"""


def test_peak_memory_of_build_and_run():
    """RSS rises by less than half of the float bytes, the inputs not counted; by less than one of
    the eight float weights when the INT4 build runs.

    In a process of its own: the peak of an earlier test would hide the rise.
    """
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    build, run = map(float, done.stdout.split())
    assert 0 < build < 0.5
    assert run < 0.5


def test_check_changes_nothing_and_says_the_same():
    digest = tvm_ffi.structural_hash(Mlp)
    assert sits_tvm.check(Mlp, CPU, config=QUANT) == []
    found = sits_tvm.check(without_num_input(Mlp), CPU, config=QUANT)
    assert codes(found) == ["not-a-weight", "not-a-weight", "nothing-to-quantize"]
    assert tvm_ffi.structural_hash(Mlp) == digest


def test_tvm_compile_with_the_registered_pipeline(rng):
    params = mlp_params(rng)
    built = tvm.compile(Mlp, sits_tvm.parse_target(CPU), relax_pipeline="sits")
    x = rng.standard_normal((1, 2, 64)).astype("float32")
    vm = relax.VirtualMachine(built, tvm.cpu())
    got = vm["main"](x, *[tvm.runtime.tensor(value) for value in params.values()]).numpy()
    want = mlp_reference(x, params)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_get_pipeline_fills_the_report(rng):
    report = Report()
    pipeline = relax.get_pipeline("sits", config=QUANT, report=report)
    tvm.compile(Mlp, sits_tvm.parse_target(CPU), relax_pipeline=pipeline)
    assert [row.name for row in report.quantized] == ["up", "down"]
    assert report.kernels


def test_dump_dir_and_verify(tmp_path):
    sits_tvm.lower(Mlp, CPU, config=Config(quant=G32, dump_dir=tmp_path / "ir", verify=True))
    dumped = [path.relative_to(tmp_path / "ir").as_posix() for path in tmp_path.rglob("*.py")]
    assert [name for name in dumped if "QuantizeMatmulWeights" in name and "1_graph" in name]
    assert [name for name in dumped if "LegalizeOps" in name and "2_kernels" in name]


def test_epilogues_join_the_int4_kernel():
    """Bias and activation after rows of a matrix are written once."""
    rows = relax.TensorType((tirx.Var("s", "int64"), 64), "float32")

    def make(bb, x, w, b):
        product = bb.emit(relax.op.matmul(x, w))
        return relax.op.nn.relu(bb.emit(relax.op.add(product, b)))

    bias = relax.TensorType((64,), "float32")
    mod = one_function(make, rows, MATRIX, bias, num_input=1)
    _, report = sits_tvm.lower(mod, CPU, config=QUANT)
    assert ("fused_int4_matmul_add_relu", "Matmul") in [(k.name, k.family) for k in report.kernels]


def test_rows_that_are_a_product_of_symbols(rng):
    """As in GPT-2: the (b, s, k) activations are viewed as (b * s, k), a bias follows."""

    def make(bb, x, w, bias):
        b, s, k = x.ty.shape
        rows = bb.emit(relax.op.reshape(x, (b * s, k)))
        return relax.op.nn.relu(bb.emit(relax.op.add(bb.emit(relax.op.matmul(rows, w)), bias)))

    b, s = (tirx.Var(name, "int64") for name in "bs")
    types = (relax.TensorType((b, s, 64), "float32"), MATRIX, relax.TensorType((64,), "float32"))
    params = {
        "a1": rng.standard_normal((64, 64)).astype("float32"),
        "a2": rng.standard_normal(64).astype("float32"),
    }
    mod = one_function(make, *types, num_input=1)
    built = sits_tvm.build(mod, CPU, params=params, config=QUANT)
    for shape in ((2, 3, 64), (1, 1, 64), (0, 4, 64)):
        x = rng.standard_normal(shape).astype("float32")
        want = x.reshape(-1, 64) @ restored(params["a1"].T, G32).T + params["a2"]
        got = run(built, tvm.runtime.tensor(x))
        np.testing.assert_allclose(got, np.maximum(want, 0), rtol=0, atol=2e-5)


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


def test_views_of_torch_keep_their_values(rng):
    """A pending negation, and a bfloat16 tensor off any alignment."""
    params = {name: torch.from_numpy(value) for name, value in mlp_params(rng).items()}
    viewed = {name: torch._neg_view(-value) for name, value in params.items()}
    x = rng.standard_normal((1, 3, 64)).astype("float32")
    want, got = (run(sits_tvm.build(Mlp, CPU, params=p, config=QUANT), x) for p in (params, viewed))
    np.testing.assert_array_equal(got, want)
    half = torch.arange(65.0).bfloat16()[1:]
    (taken,) = as_arrays({"half": half}).values()
    np.testing.assert_array_equal(torch.from_dlpack(taken).float(), half.float())


@pytest.mark.parametrize("quant", [None, G32], ids=["float", "int4"])
@pytest.mark.parametrize("offset", [4, 16, 32])
def test_inputs_may_start_anywhere(rng, quant, offset):
    """NumPy aligns to 16 bytes; kernels compiled for 64 would end the process."""

    def make(bb, x, w):
        rows = bb.emit(relax.op.nn.softmax(bb.emit(relax.op.nn.relu(x))))
        return bb.emit(relax.op.nn.silu(bb.emit(relax.op.matmul(rows, w))))

    weight = rng.standard_normal((64, 64)).astype("float32")
    built = sits_tvm.build(
        one_function(make, MATRIX, MATRIX, num_input=1), CPU,
        params={"a1": weight}, config=Config(quant=quant),
    )  # fmt: skip
    memory = np.zeros(64 * 64 * 4 + 128, "uint8")
    start = -memory.ctypes.data % 64 + offset
    x = memory[start : start + 64 * 64 * 4].view("float32").reshape(64, 64)
    x[:] = rng.standard_normal(x.shape)
    rows = torch.from_numpy(x.copy()).double().relu().softmax(-1)
    want = torch.nn.functional.silu(rows @ restored(weight.T, quant).T)
    np.testing.assert_allclose(run(built, x), want, rtol=0, atol=2e-6)


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
