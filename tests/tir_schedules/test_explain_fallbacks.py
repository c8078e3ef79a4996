"""Products with an INT4 weight that get no kernel of ours say why, where, and what to write."""

from dataclasses import replace

import pytest
from tvm import relax, tirx

from sits_tvm import Config, QuantSpec, build, lower
from sits_tvm.report import Report
from tir_schedules.matmul.int4_matmul import int4_matmul
from tir_schedules.matmul.recognise import recognise
from tir_schedules.matmul_cuda.refusals import plain_activations, refused_product

HOPPER = "cuda -arch=sm_90"


def linear(k, dtype="float16", rows=None):
    """A layer of 32 output channels."""
    builder = relax.BlockBuilder()
    rows = tirx.Var("s", "int64") if rows is None else rows
    x = relax.Var("x", relax.TensorType([rows, k], dtype))
    w = relax.Var("layers.0.fc.weight", relax.TensorType([32, k], dtype))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(w))))
            y = builder.emit_output(relax.op.nn.relu(y))
        builder.emit_func_output(y)
    return builder.get()


def report_of(mod, target=HOPPER, **quant):
    return lower(mod, target, config=Config(quant=QuantSpec(**quant)))[1]


REFUSED = {
    "odd float16": (
        (linear(97), HOPPER, {"group_size": 32}),
        "k=97 is odd: rows of float16 are copied four bytes at a time",
        "pad k to 98, with zeros in the weight and in the activations",
    ),
    "odd bfloat16": (
        (linear(97, "bfloat16"), HOPPER, {"group_size": 32}),
        "k=97 is odd: rows of bfloat16 are copied four bytes at a time",
        "pad k to 98, with zeros in the weight and in the activations",
    ),
    "one long group": (
        (linear(65664), HOPPER, {"group_size": -1, "activation": "int8"}),
        "one group has k=65664 columns: an int32 holds the sum of 65536",
        "take group_size=128, or at most 65536 input channels",
    ),
    "one long group of int4": (
        (linear(65664), HOPPER, {"group_size": -1, "activation": "int4"}),
        "one group has k=65664 columns: an int32 holds the sum of 65536",
        "take group_size=128, or at most 65536 input channels",
    ),
    "old GPU": (
        (linear(96), "cuda -arch=sm_75", {"group_size": 32}),
        "cuda -arch=sm_75 is older than sm_80",
        'build for "cuda -arch=sm_80" or newer',
    ),
}
LEGAL = {
    "even float16": (linear(98), HOPPER, {"group_size": 32}),
    "odd float32": (linear(97, "float32"), HOPPER, {"group_size": 32}),
    "longest group": (linear(65536), HOPPER, {"group_size": -1, "activation": "int8"}),
    "long, in groups": (linear(65664), HOPPER, {"group_size": 128, "activation": "int8"}),
    "float activations": (linear(65664), HOPPER, {"group_size": -1}),
    "oldest GPU": (linear(96), "cuda -arch=sm_80", {"group_size": 32}),
    "no rows": (linear(97, rows=0), HOPPER, {"group_size": 32}),
    "llvm": (linear(97), "llvm -mcpu=native", {"group_size": 32}),
}


def found_in(mod, target, quant):
    report = report_of(mod, target, **quant)
    (kernel,) = [kernel for kernel in report.kernels if "_matmul" in kernel.name]
    return kernel, [note for note in report.diagnostics if note.code == "int4-fallback"]


@pytest.mark.parametrize("case", REFUSED)
def test_says_why(case):
    (mod, target, quant), reason, advice = REFUSED[case]
    kernel, (note,) = found_in(mod, target, quant)
    assert (kernel.reason, kernel.family.split(".")[0]) == (reason, "dlight")
    assert note.message == f"{kernel.name} gets a kernel of TVM's: {reason}"
    assert (note.severity, note.function, note.help) == ("note", "main", advice)
    assert "layers_0_fc_weight_codes" in note.ir
    assert note.binding == note.ir.strip().split()[0]


@pytest.mark.parametrize("case", LEGAL)
def test_the_nearest_legal_ones_say_nothing(case):
    kernel, notes = found_in(*LEGAL[case])
    assert (kernel.reason, notes) == ("", [])
    assert not kernel.family.startswith("dlight")


def test_activations_that_are_no_rows_in_memory():
    """Columns, or with a batch of their own: a kernel would read from wrong addresses."""
    func = int4_matmul(None, 32, 64, QuantSpec(group_size=32), "float16", "fragments")
    product = recognise(func, "fragments")
    assert plain_activations(product) is not None
    (row,) = product.rows.iters
    rows = replace(product.rows, iters=[product.reduction])
    assert plain_activations(replace(product, rows=rows, reduction=row)) is None
    batched = replace(product, batch=product.rows)
    assert plain_activations(batched) is None
    assert "no tensor in memory" in refused_product(batched).reason


def test_every_call_is_named():
    """Two layers of the same shape share a kernel."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4, 97], "float16"))
    weights = [relax.Var(name, relax.TensorType([97, 97], "float16")) for name in ("a", "b")]
    with builder.function("main", [x, *weights], attrs={"num_input": 1}):
        with builder.dataflow():
            y = x
            for weight in weights:
                y = builder.emit(relax.op.matmul(y, builder.emit(relax.op.permute_dims(weight))))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    notes = report_of(builder.get(), group_size=32).diagnostics
    assert [code for note in notes for code in ("a_codes", "b_codes") if code in note.ir] == [
        "a_codes",
        "b_codes",
    ]


def test_a_build_shows_it():
    """Rows are of device code there; and files of the report keep it."""
    quant = QuantSpec(group_size=32)
    report = build(linear(97), HOPPER, config=Config(quant=quant)).report
    reasons = {kernel.reason for kernel in Report.from_json(report.to_json()).kernels}
    assert any(reason.startswith("k=97 is odd") for reason in reasons)
    assert "k=97 is odd" in str(report)
