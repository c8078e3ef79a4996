"""QuantizeMatmulWeights run on a module, and the modules that its tests share."""

import tvm_ffi
from small_modules import one_function, restored
from tvm import relax
from tvm.ir import assert_structural_equal

from relax_passes import QuantizeMatmulWeights
from sits_tvm import Config, QuantSpec
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report

OP = relax.op
G32 = QuantSpec(group_size=32)
MATRIX = relax.TensorType((64, 64), "float32")
ROWS = relax.TensorType((4, 64), "float32")


def quantize(before, **options):
    """The pass, checked not to touch its input; its diagnostics and report."""
    report, digest = Report(), tvm_ffi.structural_hash(before)
    how = {"order": options.pop("order", "rows"), "stack": options.pop("stack", True)}
    config = Config(quant=options.pop("quant", G32), **options)
    with collect() as found:
        after = QuantizeMatmulWeights(config, **how, report=report)(before)
    assert tvm_ffi.structural_hash(before) == digest
    return after, found, report


def reasons(before, **options):
    """The codes of the notes, for a module in which nothing can be quantized."""
    after, found, report = quantize(before, **options)
    assert_structural_equal(after, before)
    *notes, error = found
    assert error.code == "nothing-to-quantize"
    assert error.severity == "error"
    assert [row.reason.split(":")[0] for row in report.skipped] == [note.code for note in notes]
    assert all(note.code in error.message for note in notes)
    return [note.code for note in notes]


def module_of(weight_type, make, x_type=ROWS, num_input=1):
    """main(a0, a1), of an activation and a weight, with the result ``make(bb, a0, a1)``."""
    return one_function(make, x_type, weight_type, num_input=num_input)


def stored(weight):
    """A weight (n, k) in float64 as G32 stores it."""
    return restored(weight, G32)
