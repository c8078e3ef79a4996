"""Every float intrinsic of TensorIR, in both half types: device code compiles, values are right."""

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.ir import assert_structural_equal

from relax_passes.widen_half_intrinsics import WidenHalfIntrinsics
from sits_tvm.device_code import compile_device_code, find_toolkit
from sits_tvm.target import parse_target

UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf"),
    *("exp", "exp10", "exp2", "floor", "log", "log10", "log1p", "log2", "nearbyint", "round"),
    *("rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
BINARY = ("atan2", "copysign", "fmod", "hypot", "power", "truncmod")
# TVM makes no bfloat16 power at all; see WidenBfloat16Ops.
CASES = [
    (name, dtype)
    for name in [*UNARY, *BINARY]
    for dtype in ("float16", "bfloat16")
    if (name, dtype) != ("power", "bfloat16")
]
NATIVE = {
    *("hexp", "hexp10", "hexp2", "hlog", "hlog10", "hlog2", "hsqrt", "hrsqrt", "hsin", "hcos"),
    *("htanh", "hfloor", "hceil", "htrunc", "hrint"),
}
N = 512


def elementwise(name, dtype, threads=None):
    """C[i] = name(A[i]) or name(A[i], B[i])"""
    inputs = [te.placeholder((N,), dtype, x) for x in ("AB" if name in BINARY else "A")]
    call = getattr(tirx, name)
    out = te.compute((N,), lambda i: call(*(x[i] for x in inputs)), "C")
    func = te.create_prim_func([*inputs, out]).with_attr("global_symbol", f"{name}_{dtype}")
    if threads is None:
        return func
    schedule = s_tir.Schedule(func)
    (loop,) = schedule.get_loops(schedule.get_sblock("C"))
    schedule.bind(loop, "threadIdx.x")
    return schedule.mod["main"]


def module(cases, threads=None):
    return tvm.IRModule(
        {f"{name}_{dtype}": elementwise(name, dtype, threads) for name, dtype in cases}
    )


@pytest.mark.skipif(find_toolkit() is None, reason="pip install 'sits_tvm[cuda]'")
def test_device_code_of_all_of_them_compiles():
    mod = WidenHalfIntrinsics()(module(CASES, threads=N))
    built = tvm.tirx.build(mod, parse_target("cuda -arch=sm_90"))
    code = compile_device_code(SimpleNamespace(mod=built), "sm_90")
    assert len(code.kernels) == len(CASES)
    text = built.imports[0].inspect_source()
    bodies = text[text.index('extern "C" __global__') :]
    called = set(re.findall(r"\b[a-z]+[0-9]*(?=\()", bodies))
    assert {name for name in called if name[0] == "h" and name[-1] != "f"} <= NATIVE


def reference(name, *args):
    """PyTorch in float64."""
    spelled = {"power": "pow", "truncmod": "fmod", "nearbyint": "round", "fabs": "abs"}
    if name == "exp10":
        return torch.pow(torch.tensor(10.0, dtype=torch.float64), *args)
    return getattr(torch, spelled.get(name, name))(*args)


def inputs_of(name, dtype, rng):
    low, high = {"acosh": (1, 50), "asin": (-1, 1), "acos": (-1, 1), "atanh": (-0.99, 0.99)}.get(
        name, (0.05, 8) if name.startswith(("log", "rsqrt", "sqrt", "power")) else (-8, 8)
    )
    x = rng.uniform(low, high, N)
    if name in ("nearbyint", "round"):
        x = np.round(x * 2) / 2  # ties
    return [values.astype(dtype) for values in (x, rng.uniform(0.3, 3, N))[: arity(name)]]


def arity(name):
    return 2 if name in BINARY else 1


def test_same_numbers(rng):
    """Within the last place of the half type, for all that is computed in float32."""
    theirs = {*NATIVE, "hfmod"}  # left to the target; LLVM has no fmod
    cases = [case for case in CASES if f"h{case[0]}" not in theirs]
    built = tvm.tirx.build(WidenHalfIntrinsics()(module(cases)), parse_target("llvm -mcpu=native"))
    for name, dtype in cases:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        args = inputs_of(name, kind, rng)
        out = tvm.runtime.tensor(np.zeros(N, kind))
        built[f"{name}_{dtype}"](*(tvm.runtime.tensor(x) for x in args), out)
        doubles = [torch.from_numpy(x.astype("float64")) for x in args]
        expected = reference(name, *doubles).numpy()
        error = np.abs(out.numpy().astype("float64") - expected)
        step = np.maximum(np.abs(expected), 2.0**-10) * 2.0 ** -(10 if dtype == "float16" else 7)
        assert (error <= step).all(), (name, dtype, (error / step).max())


def test_rounding_is_to_even_and_exact():
    built = tvm.tirx.build(
        WidenHalfIntrinsics()(tvm.IRModule({"f": elementwise("nearbyint", "float16")})), "llvm"
    )
    x = np.resize(np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1023.5, 65504], "float16"), N)
    out = tvm.runtime.tensor(np.zeros(N, "float16"))
    built["nearbyint_float16"](tvm.runtime.tensor(x), out)
    assert np.array_equal(out.numpy(), np.rint(x))


@pytest.mark.parametrize(
    "case", [("nearbyint", "float32"), ("exp", "float16"), ("abs", "bfloat16")]
)
def test_leaves_what_targets_have_alone(case):
    mod = tvm.IRModule({"f": elementwise(*case)})
    assert_structural_equal(WidenHalfIntrinsics()(mod), mod)


def test_leaves_its_input_untouched_and_runs_once():
    mod = tvm.IRModule({"f": elementwise("sinh", "float16")})
    digest = tvm_ffi.structural_hash(mod)
    once = WidenHalfIntrinsics()(mod)
    assert tvm_ffi.structural_hash(mod) == digest != tvm_ffi.structural_hash(once)
    assert_structural_equal(WidenHalfIntrinsics()(once), once)
