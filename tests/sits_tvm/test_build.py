"""build, lower and check: numbers and reports."""

import re

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from small_builds import CPU, G32, MATRIX, QUANT, codes, run
from small_modules import Mlp, mlp_params, mlp_reference, one_function, restored, without_num_input
from tvm import relax, tirx

import sits_tvm
from sits_tvm import Config, QuantSpec, Report
from sits_tvm.params import as_arrays


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
    assert {"Matmul"} == {kernel.family for kernel in report.kernels}
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


def test_functions_of_an_epilogue_are_vector_arithmetic(rng):
    """libm would be called for one element at a time: four times the time of the product."""

    def make(bb, x, w):
        return relax.op.nn.gelu_tanh(bb.emit(relax.op.matmul(x, w)))

    weight = rng.standard_normal((64, 64)).astype("float32")
    mod = one_function(make, MATRIX, MATRIX, num_input=1)
    built = sits_tvm.build(mod, CPU, params={"a1": weight}, config=QUANT)
    assert [kernel.name for kernel in built.report.kernels] == ["fused_int4_matmul_gelu_tanh"]
    assembly = built.mod.imports[0].inspect_source("asm")
    assert "ret" in assembly
    assert not re.findall(r"call\w*\s+\S*(?:exp|tanh)", assembly)


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
