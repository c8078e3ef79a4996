"""Build and run kernels for the tests of this folder."""

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.s_tir.dlight import ApplyDefaultSchedule

from sits_tvm import parse_target
from tir_schedules.matmul_cpu.rule import Matmul

TARGETS = {
    "host": "llvm -mcpu=native -num-cores=2",
    "haswell": "llvm -mcpu=haswell -num-cores=2",
    "generic": "llvm",
}
ROWS = (0, 1, 2, 5, 6, 7, 16, 33, 129)


def target(name="host"):
    return parse_target(TARGETS[name])


def schedule(func, name="host"):
    """The function as `Matmul` schedules it."""
    scheduled = Matmul().apply(func, target(name), False)
    assert scheduled is not None, "Matmul declined"
    return scheduled.mod["main"]


def compile_kernel(func, name="host"):
    """``run(*inputs, shape=…, dtype=…)`` of a scheduled PrimFunc; these are of the output."""
    with target(name):
        kernel = tvm.compile(schedule(func, name), target=target(name))["main"]

    def run(*arrays, shape, dtype="float32"):
        output = tvm.runtime.tensor(np.full(shape, np.nan, dtype))
        kernel(*(tvm.runtime.tensor(array) for array in arrays), output)
        return output.numpy()

    return run


def lower_relax(mod, name="host"):
    """`mod` legalized, fused and scheduled by `Matmul` alone."""
    with target(name):
        return tvm.transform.Sequential(
            [
                relax.transform.FuseTransposeMatmul(),
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FoldConstant(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                ApplyDefaultSchedule(Matmul()),
            ]
        )(mod)


def kernels(mod):
    """(name, whether it is scheduled) of every PrimFunc of a lowered module."""
    return {
        gv.name_hint: bool(func.attrs.get("tirx.is_scheduled", False))
        for gv, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc)
    }


def compile_relax(mod, name="host"):
    """``run(*arrays)`` of `main`, after checking that there is one kernel, and that it is ours."""
    lowered = lower_relax(mod, name)
    assert list(kernels(lowered).values()) == [True], kernels(lowered)
    vm = relax.VirtualMachine(relax.build(lowered, target(name)), tvm.cpu())
    return lambda *arrays: vm["main"](*(tvm.runtime.tensor(array) for array in arrays)).numpy()


def assert_close(actual, expected, *factors):
    """Within float32 rounding, 2e-6 of the sum of magnitudes, plus one step of the output."""
    x, w = (np.abs(np.asarray(factor, "float64")) for factor in factors)
    bound = 2e-6 * (x @ w) + np.finfo(actual.dtype).eps * np.abs(expected) + 1e-30
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    excess = np.abs(actual - expected) - bound
    assert (excess <= 0).all(), f"off by {np.abs(actual - expected).max()}, allowed {bound.max()}"
