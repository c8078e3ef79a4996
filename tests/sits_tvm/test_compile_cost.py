"""What a build does once, or not at all. Unlike its seconds this does not depend on the machine."""

import inspect
import subprocess
import sys
from collections import Counter

import pytest
import tvm
import tvm_ffi
from cuda_sources import needs_nvcc
from tvm import tirx
from tvm.ir.instrument import pass_instrument
from tvm.s_tir import dlight
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from sits_tvm import Config, QuantSpec, quick_parsing
from sits_tvm._pass_context import with_instruments

RULE = "TensorCoreMatmul"
TARGET = "cuda -arch=sm_90a"
CONFIG = Config(quant=QuantSpec(group_size=32))


@I.ir_module
class Linear:
    @R.function
    def main(x: R.Tensor(("b", "s", 64), "float16"), w: R.Tensor((64, 64), "float16")) -> R.Tensor(
        ("b", "s", 64), "float16"
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, R.permute_dims(w))
            R.output(y)
        return y


@I.ir_module
class Square:
    @R.function
    def main(
        x: R.Tensor(("b", "s", 4096), "float16"), w: R.Tensor((4096, 4096), "float16")
    ) -> R.Tensor(("b", "s", 4096), "float16"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, R.permute_dims(w))
            R.output(y)
        return y


def build():
    return sits_tvm.build(Linear, TARGET, config=CONFIG)


def without_times(report):
    return {key: value for key, value in report.to_dict().items() if key != "passes"}


@needs_nvcc
def test_a_second_build_runs_no_tool(tmp_path, monkeypatch):
    commands, run = [], subprocess.run

    def noted(command, **options):
        commands.append(command)
        return run(command, **options)

    monkeypatch.setenv("SITS_TVM_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", noted)
    first = build()
    assert sum("-cubin" in command for command in commands) == 1
    assert sum("-json" in command for command in commands) == 1
    commands.clear()
    second = build()
    assert {command[-1] for command in commands} == {"--version"}
    assert second.cubins == first.cubins
    assert without_times(second.report) == without_times(first.report)
    assert all(kernel.sass["total"] for kernel in second.report.kernels)


@needs_nvcc
def test_a_kernel_is_scheduled_lowered_and_emitted_once(monkeypatch):
    runs = Counter()

    @pass_instrument
    class Count:
        def run_before_pass(self, mod, info):
            runs[info.name] += 1

    generate = tvm.tirx.build.__globals__["codegen_build"]

    def noted(mod, target):
        runs[f"code for {target.kind.name}"] += 1
        return generate(mod, target)

    monkeypatch.setitem(tvm.tirx.build.__globals__, "codegen_build", noted)
    with with_instruments(Count()):
        build()
    for name in ("ApplySchedules", "s_tir.CompactBufferAllocation", "tirx.SplitHostDevice"):
        assert runs[name] == 1
    assert runs["code for cuda"] == runs["code for llvm"] == 1


def int4_kernel(mod=Linear, group_size=32, **quant):
    quant = QuantSpec(group_size=group_size, **quant)
    lowered, _ = sits_tvm.lower(mod, TARGET, config=Config(quant=quant))
    (func,) = [f for f in lowered.functions.values() if str(f.attrs.get("sits.rule")) == RULE]
    return func


def test_conditions_around_kernels_are_variables():
    """`CompactBufferAllocation` weighs other ones at every access to a register."""
    conditions = []

    def note(branch):
        kernels = []
        tvm_ffi.structural_walk(branch, (tirx.AttrStmt, lambda attr: kernels.append(attr.attr_key)))
        if "thread_extent" in kernels:
            conditions.append(branch.condition)

    tvm_ffi.structural_walk(int4_kernel().body, (tirx.IfThenElse, note))
    assert len(conditions) >= 6
    assert all(isinstance(condition, tirx.Var) for condition in conditions)


@pytest.mark.parametrize("quant", [{}, {"activation": "int8", "symmetric": False}])
@pytest.mark.parametrize("group_size", [32, -1])
def test_variables_of_kernels_are_no_indices(quant, group_size):
    """`CompactBufferAllocation` weighs those at every access to a register behind them."""
    dtypes = []

    def note(bind):
        dtypes.append(str(bind.var.ty))

    body = int4_kernel(group_size=group_size, **quant).body
    tvm_ffi.structural_walk(body, (tirx.Bind, note))
    assert len(dtypes) >= 50
    assert not {"int32", "int64"} & set(dtypes)


@pytest.mark.parametrize(
    ("quant", "most"), [({}, 46_000), ({"activation": "int8", "symmetric": False}, 91_000)]
)
def test_kernels_have_loops(quant, most):
    """TVM unrolls them after half of its passes; with these it went through 105 and 124 thousand
    expressions unrolled.
    """
    found = Counter()
    body = int4_kernel(Square, group_size=128, **quant).body
    tvm_ffi.structural_walk(body, (tvm.ir.Expr, lambda expr: found.update(["all"])))
    assert 20_000 < found["all"] < most


ONLY_INT4 = """
import sys, sits_tvm
from test_compile_cost import CONFIG, RULE, TARGET, Linear
_, report = sits_tvm.lower(Linear, TARGET, config=CONFIG)
assert RULE in [kernel.family for kernel in report.kernels]
assert "tvm.s_tir.tensor_intrin" not in sys.modules
_, report = sits_tvm.lower(Linear, TARGET)
assert [kernel.family for kernel in report.kernels][-1] == "dlight.Matmul"
"""


def test_tensor_intrinsics_are_for_float_products():
    """TVM parses hundreds of functions to import them."""
    path = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", ONLY_INT4]
    done = subprocess.run(command, env=path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_rules_of_tvm_parse_quickly(monkeypatch):
    """They import the intrinsics, which takes half a minute with `inspect.stack` as it is."""
    stacks, apply = [], dlight.gpu.Matmul.apply

    def noted(*args):
        stacks.append(inspect.stack)
        return apply(*args)

    monkeypatch.setattr(dlight.gpu.Matmul, "apply", noted)
    before = inspect.stack
    sits_tvm.lower(Linear, TARGET)
    assert stacks
    assert set(stacks) == {quick_parsing._stack}
    assert inspect.stack is before
