"""The vectorised functions against float64, everywhere that matters in float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.target import Target

from tir_schedules.cpu.vector_math import exp_nonpositive, vectorizable_math

HOST = {"kind": "llvm", "mcpu": tvm.get_global_func("target.llvm_get_system_cpu")()}
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, 88.72, 88.73, -87.3, -103.9, -150.0, 200.0, 1e-40, 1e-20]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "exp": (tirx.exp, np.exp, 1.3),
    "tanh": (tirx.tanh, np.tanh, 3.0),
    "sigmoid": (tirx.sigmoid, sigmoid, 2.5),
    "erf": (tirx.erf, np.vectorize(math.erf), 3.0),
}


def kernel(function, size: int, dtype: str) -> tirx.PrimFunc:
    x, y = (tirx.decl_buffer((size,), dtype, name) for name in "xy")
    i, lane = tirx.Var("i", "int32"), tirx.Var("lane", "int32")
    store = tirx.BufferStore(y, function(tirx.BufferLoad(x, [i * 16 + lane])), [i * 16 + lane])
    body = tirx.For(lane, 0, 16, tirx.ForKind.VECTORIZED, vectorizable_math(store))
    body = tirx.For(i, 0, size // 16, tirx.ForKind.SERIAL, body)
    attrs = {"global_symbol": "main", "s_tir": True, "tirx.noalias": True}
    return tirx.PrimFunc([x, y], body).with_attr(attrs)


def run(function, x: np.ndarray, target: dict) -> tuple[np.ndarray, str]:
    mod = tvm.IRModule({"main": kernel(function, x.size, str(x.dtype))})
    built = tvm.compile(mod, target=Target(target))
    y = tvm.runtime.tensor(np.zeros_like(x))
    built["main"](tvm.runtime.tensor(x), y)
    return y.numpy(), built.mod.inspect_source("asm")


def points(rng: np.random.Generator) -> np.ndarray:
    parts = [
        SPECIAL,
        rng.uniform(-104, 89, 1 << 16),
        rng.uniform(-5, 5, 1 << 16),
        rng.standard_normal(1 << 14) * 10.0 ** rng.uniform(-37, 0, 1 << 14),
        np.linspace(-1.01, 1.01, 4096 - len(SPECIAL)),
    ]
    return np.concatenate(parts).astype("float32")


@pytest.mark.parametrize("target", [HOST, {"kind": "llvm"}], ids=["host", "generic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_in_units_of_the_last_place(name, target, rng):
    function, reference, most = FUNCTIONS[name]
    x = points(rng)
    y, _ = run(function, x, target)
    with np.errstate(over="ignore"):
        exact = reference(x.astype("float64"))
        nearest = exact.astype("float32")
    normal = np.isfinite(nearest) & (np.abs(nearest) >= np.finfo("float32").tiny)
    unit = np.spacing(np.abs(nearest[normal])).astype("float64")
    assert (np.abs(y[normal] - exact[normal]) / unit).max() <= most
    # 1 / (1 + e**-x) has no denormal values in float32: e**-x overflows first, as in torch
    tiny = np.finfo("float32").tiny if name == "sigmoid" else 3e-45
    np.testing.assert_allclose(y[~normal], nearest[~normal], atol=tiny)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float16_is_rounded_once(name, rng):
    function, reference, _ = FUNCTIONS[name]
    x = rng.uniform(-8, 8, 4096).astype("float16")
    exact = reference(x.astype("float64"))
    error = np.abs(run(function, x, HOST)[0] - exact) / np.spacing(exact.astype("float16"))
    assert np.abs(error).max() <= 0.51


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_call_into_libm_remains(name):
    _, assembly = run(FUNCTIONS[name][0], np.zeros(64, "float32"), HOST)
    assert not any(f"{call}f@PLT" in assembly for call in ("exp", "tanh", "erf"))


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_small_powers_are_products(exponent, rng):
    x = rng.standard_normal(4096).astype("float32")
    y, assembly = run(lambda v: tirx.pow(v, tirx.const(exponent, "float32")), x, HOST)
    np.testing.assert_allclose(y, x.astype("float64") ** exponent, rtol=3e-7)
    assert "powf" not in assembly


# TVM's functions of one float that `VectorizeLoop` makes vectors of, by `TVectorizable`.
VECTORISED = {
    **{name: getattr(np, name) for name in ("cos", "cosh", "exp", "exp2", "fabs", "floor", "log")},
    **{
        name: getattr(np, name) for name in ("log10", "sin", "sinh", "sqrt", "tan", "tanh", "trunc")
    },
    **{"round": np.round, "sigmoid": sigmoid},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", VECTORISED)
def test_what_tvm_makes_vectors_of_compiles(name, dtype, rng):
    x = rng.uniform(0.6, 2, 64).astype(dtype)
    y, _ = run(lambda v: tirx.call_intrin(dtype, f"tirx.{name}", v), x, HOST)
    exact = VECTORISED[name](x.astype("float64"))
    np.testing.assert_allclose(y, exact, rtol=1e-6 if dtype == "float32" else 1e-14, atol=1e-7)


def test_leaves_other_types_and_functions_alone():
    x, y = tirx.Var("x", "float64"), tirx.Var("y", "float32")
    for expression in (tirx.exp(x), tirx.log(y), tirx.pow(y, y), tirx.sqrt(y)):
        assert vectorizable_math(expression).same_as(expression)


def test_exp_nonpositive():
    rng = np.random.default_rng(0)
    special = [-np.inf, np.nan, 0.0, -0.0, -87.0, -87.01, -104.0, -1e30]
    x = np.concatenate([special * 2, rng.uniform(-87, 0, 1 << 16)]).astype("float32")
    got, _ = run(exp_nonpositive, x, HOST)
    want = np.where(x < -87, 0.0, np.exp(x.astype("float64")))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    np.testing.assert_allclose(got, want, rtol=1.3 * 2.0**-23, atol=0.0)
