"""LowerAttention replaces the op everywhere, touches nothing else, and keeps the numbers."""

import inspect
import textwrap

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
import tir_schedules
from relax_passes.lower_attention import LowerAttention
from relax_passes.op import attention
from sits_tvm import Report, SitsError, parse_target
from sits_tvm.diagnostics import collect


def verify(before, expected):
    digest = tvm_ffi.structural_hash(before)
    after = LowerAttention()(before)
    assert relax.analysis.check_well_formed(after)
    assert_structural_equal(after, expected)
    assert tvm_ffi.structural_hash(before) == digest


def documented(name):
    block = inspect.getdoc(LowerAttention).split(f"{name}::\n")[1]
    block = block.split("\n\nAfter::")[0].split("\n\nParameters\n")[0]
    return tvm.script.from_source(textwrap.dedent(block))


def test_does_what_its_docstring_says():
    verify(documented("Before"), documented("After"))


def test_leaves_other_ops_alone():
    """A module without attention comes back equal, `R.nn.attention` included."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 8, 2, 4), "float32")):
            with R.dataflow():
                a = R.nn.attention(x, x, x)
                y = R.matmul(a, R.permute_dims(a, [0, 1, 3, 2]))
                R.output(y)
            return y

    verify(Before, Before)


@I.ir_module
class _TwoFunctions:
    @R.function
    def main(q: R.Tensor((1, 2, "s", 4), "float32"), k: R.Tensor((1, 1, "t", 4), "float32")):
        with R.dataflow():
            a = R.sits.attention(q, k, k, causal="bottom_right", window=3)
            y = R.sits.attention(a, k, k, softcap=2.0, empty_row="zero", scale=1.0)
            R.output(y)
        return y

    @R.function
    def other(q: R.Tensor((1, 2, 3, 4), "float32"), c: R.Tensor((), "bool")):
        if c:  # noqa: SIM108
            y = R.sits.attention(q, q, q, causal=0)
        else:
            y = R.add(q, q)
        return y


def test_lowers_every_site_of_every_function():
    after = LowerAttention()(_TwoFunctions)
    assert "sits.attention" not in after.script()
    assert relax.analysis.check_well_formed(after)


def test_same_numbers_as_legalize_ops():
    """The pass and FLegalize are one definition; this one keeps the matmuls as Relax ops."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(s).astype("float32") for s in ((1, 2, 3, 4), (1, 1, 5, 4)))
    results = []
    for mod in (_TwoFunctions, LowerAttention()(_TwoFunctions)):
        vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
        results.append(vm["main"](q, k).numpy())
    np.testing.assert_array_equal(*results)


def lowered(mod):
    with collect() as notes:
        after = LowerAttention("llvm -mcpu=haswell")(mod)
    return after, [note.message for note in notes]


def test_becomes_a_function_that_the_target_has_a_kernel_of():
    """Marked so that no fusion touches it; `Attention` schedules it."""
    after, notes = lowered(_TwoFunctions)
    assert notes == []
    assert relax.analysis.check_well_formed(after)
    kernels = [f for _, f in after.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(kernels) == 3
    assert {int(kernel.attrs["op_pattern"]) for kernel in kernels} == {8}
    with parse_target("llvm -mcpu=haswell"):
        scheduled = tir_schedules.ApplySchedules(*tir_schedules.RULES)(after)
    kernels = [f for _, f in scheduled.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert {str(kernel.attrs["sits.rule"]) for kernel in kernels} == {"Attention"}
    assert "nn.softmax" not in after.script()


def test_equal_calls_share_a_kernel():
    """Up to the names of symbolic extents; Sk = Sq is another kernel than Sk of its own."""

    @I.ir_module
    class Before:
        @R.function
        def main(q: R.Tensor((1, 2, "s", 4), "float32"), k: R.Tensor((1, 1, "t", 4), "float32")):
            with R.dataflow():
                a = R.sits.attention(q, k, k, causal=0)
                b = R.sits.attention(a, k, k, causal=0)
                y = R.sits.attention(b, b, b, causal=0)
                R.output(y)
            return y

        @R.function
        def other(q: R.Tensor((1, 2, "n", 4), "float32"), k: R.Tensor((1, 1, "m", 4), "float32")):
            return R.sits.attention(q, k, k, causal=0)

    after, _ = lowered(Before)
    kernels = [gv for gv, f in after.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(kernels) == 2
    assert relax.analysis.check_well_formed(after)


def test_says_why_there_is_no_kernel():
    @I.ir_module
    class Doubles:
        @R.function
        def main(q: R.Tensor((1, 2, 3, 4), "float64")):
            return R.sits.attention(q, q, q)

    after, notes = lowered(Doubles)
    assert_structural_equal(after, LowerAttention()(Doubles))
    assert notes == [
        "lowered to plain ops: q, k and v are float64; the kernel takes float16, bfloat16, float32"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_and_plain_ops_agree_in_a_build(dtype):
    types = [relax.TensorType(s, dtype) for s in ((1, 4, 20, 8), (1, 2, 70, 8), (1, 2, 70, 8))]
    args = [relax.Var(name, ty) for name, ty in zip("qkv", types, strict=True)]
    bb = relax.BlockBuilder()
    with bb.function("main", args):
        bb.emit_func_output(bb.emit(attention(*args, causal="bottom_right")))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(n) for n in ty.shape]).astype(dtype) for ty in types]
    results, families = [], []
    for choice in ("exact", "off"):
        built = sits_tvm.build(bb.get(), "llvm", config=sits_tvm.Config(attention=choice))
        families.append("Attention" in {kernel.family for kernel in built.report.kernels})
        vm = relax.VirtualMachine(built, tvm.cpu())
        results.append(vm["main"](*map(tvm.runtime.tensor, arrays)).numpy().astype("float32"))
    np.testing.assert_allclose(*results, atol=1e-6 if dtype == "float32" else 2e-2)
    assert families == [True, False]


def test_the_report_has_a_row_per_attention():
    """Two that share a kernel, and one that no kernel takes."""
    single, double = (relax.TensorType((1, 2, 3, 8), dtype) for dtype in ("float32", "float64"))
    q, w = relax.Var("q", single), relax.Var("w", double)
    bb = relax.BlockBuilder()
    with bb.function("main", [q, w]):
        with bb.dataflow():
            first = bb.emit(attention(q, q, q))
            second = bb.emit(attention(first, q, q))
            third = bb.emit(attention(w, w, w))
            out = bb.emit_output(relax.Tuple([second, third]))
        bb.emit_func_output(out)
    report = Report()
    LowerAttention("llvm", report=report)(bb.get())
    reason = "q, k and v are float64; the kernel takes float16, bfloat16, float32"
    rows = [(row.binding, row.kernel, row.reason) for row in report.lowered_attention]
    names = [first.name, second.name, third.name]
    found = zip(names, ["attention", "attention", ""], ["", "", reason], strict=True)
    assert rows == list(found)
    assert "attention lowered: 2 of 3 fused" in str(report)
    assert Report.from_json(report.to_json()).lowered_attention == report.lowered_attention
    report = Report()
    LowerAttention(report=report)(bb.get())
    assert [row.reason for row in report.lowered_attention] == ["plain ops are asked for"] * 3


def test_no_kernel_rounds_scores_to_float16():
    """T5 in half precision adds its bias to them; the kernels have them in float32."""
    q = relax.Var("q", relax.TensorType((1, 2, 3, 16), "float16"))
    bb = relax.BlockBuilder()
    with bb.function("main", [q]):
        bb.emit_func_output(bb.emit(attention(q, q, q, scores_dtype="float16")))
    report = Report()
    after = LowerAttention("llvm", report=report)(bb.get())
    assert "R.astype" in after["main"].script()
    (row,) = report.lowered_attention
    assert (row.kernel, row.reason) == ("", "scores_dtype is float16; the kernel's is float32")


def test_refuses_what_is_no_target():
    with pytest.raises(SitsError, match="a Report is no target"):
        LowerAttention(Report())
