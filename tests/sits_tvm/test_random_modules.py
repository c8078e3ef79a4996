"""Random modules compute what NumPy computes, in float and in INT4, the same in every build."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from random_modules import RandomModule, random_module
from tvm import relax

import sits_tvm
import tir_schedules
from sits_tvm import Config, QuantSpec, SitsError
from sits_tvm.diagnostics import collect
from sits_tvm.pipeline import fusion_passes, graph_passes
from sits_tvm.report import Report

SPEC = QuantSpec(group_size=32)
CONFIGS = {
    "float": Config(),
    "int4": Config(quant=SPEC, quantize_embedding=True, quantize_head=True),
}
NOT_IDEMPOTENT = ("QuantizeMatmulWeights",)
"""An embedding table in INT4 is none any more: a product that read it too is no head then."""
SEEDS = st.integers(0, 2**32 - 1)


def results_of(built, function):
    vm = relax.VirtualMachine(built, tvm.cpu())
    inputs = [tvm.runtime.tensor(array) for _, array in function.inputs]
    found = vm[function.name](*inputs, *built.params_for(function.name))
    found = found if len(function.results) > 1 else [found]
    return [part.numpy() for part in found]


def check_numbers(drawn: RandomModule, built):
    spec = SPEC
    names = {entry.name for entry in built.report.quantized if entry.name in drawn.weights}
    weights = drawn.quantized(names, spec)
    for function in drawn.functions:
        expected = function.reference(weights)
        for value, got, want in zip(
            function.results, results_of(built, function), expected, strict=True
        ):
            assert got.shape == want.shape
            assert str(got.dtype) == value.dtype
            if not value.is_float:
                np.testing.assert_array_equal(got, want)
                continue
            got, limit = got.astype("float64"), function.tolerance
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
            finite = np.isfinite(want)
            largest = np.abs(want[finite]).max(initial=1.0)
            np.testing.assert_allclose(got[finite], want[finite], rtol=limit, atol=limit * largest)


def check_passes(mod, config):
    """A second application changes nothing."""
    target = sits_tvm.parse_target("llvm")
    with collect(), target:
        for one in [
            *graph_passes(config, target, Report()),
            *fusion_passes(config, target, Report()),
            tir_schedules.ApplyRecords(tir_schedules.RULES),
        ]:
            mod = one(mod)
            assert relax.analysis.check_well_formed(mod), one.info.name
            ours = type(one).__module__.startswith(("relax_passes", "tir_schedules"))
            if ours and str(one.info.name) not in NOT_IDEMPOTENT:
                again = one(mod)
                assert tvm_ffi.structural_equal(again, mod), f"{one.info.name} changed its result"


def build(drawn, config):
    """None if INT4 is asked for, and nothing can be."""
    try:
        return sits_tvm.build(drawn.mod, "llvm", params=drawn.weights, config=config)
    except SitsError as error:
        if [diagnostic.code for diagnostic in error.diagnostics] == ["nothing-to-quantize"]:
            return None
        raise


def check(drawn):
    digest = tvm_ffi.structural_hash(drawn.mod)
    for config in CONFIGS.values():
        built = build(drawn, config)
        if built is not None:
            check_numbers(drawn, built)
            check_passes(drawn.mod, config)
        assert tvm_ffi.structural_hash(drawn.mod) == digest


def digests(seeds):
    """Of the lowered IR and of the library of random modules."""
    found = []
    for seed in seeds:
        drawn = random_module(seed, 5)
        lowered, _ = sits_tvm.lower(drawn.mod, "llvm", params=drawn.weights)
        with tempfile.TemporaryDirectory() as folder:
            path = build(drawn, Config()).save(Path(folder) / "model")
            library = hashlib.sha256((path / "library.so").read_bytes()).hexdigest()
        found += [hashlib.sha256(tvm.ir.save_json(lowered).encode()).hexdigest(), library]
    return found


@settings(max_examples=8, derandomize=True, deadline=None, database=None)
@given(SEEDS, st.integers(1, 6))
def test_random_modules(seed, most):
    check(random_module(seed, most))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, database=None)
@given(SEEDS, st.integers(1, 9))
def test_many_random_modules(seed, most):
    check(random_module(seed, most))


@pytest.mark.slow
def test_builds_are_the_same_in_every_process():
    seeds = [*range(6)]
    code = f"import test_random_modules as t; print(*t.digests({seeds}), sep='\\n')"
    here = Path(__file__).parent
    outputs = []
    for hash_seed in ("1", "2"):
        path = os.pathsep.join([*map(str, (here, here.parent, here.parent.parent))])
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.split()[-2 * len(seeds) :])
    assert outputs[0] == outputs[1] == digests(seeds)
