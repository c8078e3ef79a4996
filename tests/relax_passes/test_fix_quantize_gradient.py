"""FixQuantizeGradient: every spelling becomes one op with the same values, bit for bit."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from quantize_forms import (
    CHANNELS,
    ROWS,
    SCALE,
    X,
    add_function,
    const,
    hard_inputs,
    one_function,
    op_names,
)
from quantize_spellings import FORMS
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_passes.fix_quantize_gradient import FixQuantizeGradient
from sits_tvm.report import Report


@pytest.fixture(scope="module")
def before():
    """One function per spelling."""
    bb = relax.BlockBuilder()
    for name, (spell, parameters, _) in FORMS.items():
        add_function(bb, name, spell, [X, *parameters])
    return bb.get()


@pytest.fixture(scope="module")
def fixed(before):
    report = Report()
    digest = tvm_ffi.structural_hash(before)
    after = FixQuantizeGradient(report=report)(before)
    assert tvm_ffi.structural_hash(before) == digest
    return after, {site.function: site for site in report.quantize_sites}


@pytest.fixture(scope="module")
def machines(before, fixed):
    return [relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu()) for mod in (before, fixed[0])]


@pytest.mark.parametrize("name", FORMS)
def test_becomes_one_op(fixed, name):
    after, sites = fixed
    shapes = ("reshape", "broadcast_to", "astype")
    ops = [op for op in op_names(after[name]) if op not in shapes]
    assert ops == ["sits.fake_quantize"]
    assert (sites[name].fixed, sites[name].reason) == (True, "")
    call = next(b.value for b in after[name].body.blocks[0].bindings if "fake" in str(b.value))
    for key, value in FORMS[name][2].items():
        assert call.attrs[key] == value, key


@pytest.mark.parametrize("name", FORMS)
def test_same_values_bit_for_bit(machines, name, rng):
    """On ties, their neighbours, bounds, infinities and denormals; a zero may change its sign."""
    shapes = [shape for shape, _ in FORMS[name][1]]
    for trial in range(8):
        scales = np.exp(rng.uniform(-6, 4, CHANNELS)).astype("float32")
        if not shapes or shapes[0] == ():
            scales = np.full(CHANNELS, 0.125 if not shapes else scales[0], "float32")
        x = hard_inputs(scales, rng)
        args = [x]
        if shapes:
            args.append(scale_for(shapes[0], scales, x, rng))
        if len(shapes) == 2:
            dtype = FORMS[name][1][1][1]
            zero = rng.integers(0, 15) if trial else 5
            fraction = rng.choice([0.3, 0.5004]) if dtype == "float32" else 0
            args.append(np.asarray(zero + fraction, dtype))
        want, got = (vm[name](*map(tvm.runtime.tensor, args)).numpy() for vm in machines)
        np.testing.assert_array_equal(got, want)
        assert len(np.unique(want)) > 2


def scale_for(shape, scales, x, rng):
    if shape == ():
        return scales[0]
    if shape == (CHANNELS,):
        return scales
    return np.exp(rng.uniform(-3, 3, shape)).astype("float32")


@pytest.mark.parametrize("name", ["commuted", "integer_round_trip"])
def test_nan_stays_nan(machines, name):
    """The exception to equal values: through integers NaN becomes a code."""
    x = np.full((ROWS, CHANNELS), np.nan, "float32")
    scale = np.ones(FORMS[name][1][0][0], "float32")
    assert np.isnan(machines[1][name](*map(tvm.runtime.tensor, (x, scale))).numpy()).all()


def test_leaves_the_op_and_other_arithmetic_alone():
    """Nothing is spelled out: the very same module comes back, and twice changes nothing."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), s: R.Tensor((8,), "float32")):
            with R.dataflow():
                y = R.sits.fake_quantize(x, s, axis=1)
                whole = R.floor(R.divide(x, s))
                rest = R.subtract(x, R.multiply(whole, s))
                mask = R.astype(R.astype(R.greater(x, rest), "int32"), "float32")
                scaled = R.multiply(R.clip(x, -8, 7), s)
                out = R.add(R.add(R.multiply(mask, y), rest), scaled)
                R.output(out)
            return out

    report = Report()
    assert FixQuantizeGradient(report=report)(Before).same_as(Before)
    assert [(s.binding, s.form, s.fixed) for s in report.quantize_sites] == [
        ("y", "fake_quantize", True)
    ]


def test_twice_is_once(fixed):
    assert_structural_equal(FixQuantizeGradient()(fixed[0]), fixed[0])


def test_codes_that_are_read_elsewhere_stay():
    def spell(b, x, s):
        codes = b.clip(b.round(b.divide(x, s)), -8, 7)
        return relax.Tuple([codes, b.multiply(codes, s)])

    func = FixQuantizeGradient()(one_function(spell, X, SCALE))["main"]
    assert op_names(func) == ["divide", "round", "clip", "sits.fake_quantize"]


def test_what_a_local_function_reads_stays():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((8,), "float32"), y: R.Tensor((8,), "float32")):
            double = R.add(y, y)
            codes = R.clip(R.round(R.divide(x, R.const(0.5, "float32"))), -8, 7)
            q = R.multiply(codes, R.const(0.5, "float32"))

            @R.function
            def scaled(z: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                w = R.multiply(z, double)
                return w

            out = scaled(q)
            return out

    after = FixQuantizeGradient()(Before)
    assert op_names(after["main"]) == ["add", "sits.fake_quantize"]
    relax.analysis.well_formed(after)  # raises


def test_a_symbolic_batch():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), s: R.Tensor(("n", 1), "float32")):
            n = T.int64()
            with R.dataflow():
                y = R.multiply(R.clip(R.round(R.divide(x, s)), -8, 7), s)
                R.output(y)
            return y

    call = FixQuantizeGradient()(Before)["main"].body.blocks[0].bindings[-1].value
    assert call.op.name == "relax.sits.fake_quantize"
    assert call.attrs["axis"] == 0


def test_bound_arguments_are_constants():
    """Constants for scale and zero point, per channel, in the shape in which they broadcast."""
    scales = np.linspace(0.5, 2, CHANNELS).astype("float32").reshape(CHANNELS)
    zeros = np.arange(CHANNELS).astype("float32")

    def spell(b, x):
        codes = b.clip(b.add(b.round(b.divide(x, const(scales))), const(zeros)), 0, 15)
        return b.multiply(b.subtract(codes, const(zeros)), const(scales))

    binding = FixQuantizeGradient()(one_function(spell, X))["main"].body.blocks[0].bindings[0]
    _, scale, zero = binding.value.args
    np.testing.assert_array_equal(scale.value.numpy(), scales)
    np.testing.assert_array_equal(zero.value.numpy(), zeros)
