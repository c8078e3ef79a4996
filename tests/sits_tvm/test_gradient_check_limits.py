"""`check_gradient_conservation`: what is noise, what no vector decides, what the limits are."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gradient_modules import by_hand, ones, squares
from small_modules import one_function
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

from sits_tvm import check_gradient_conservation, differentiate
from sits_tvm.gradient_check._comparison import _status
from sits_tvm.gradient_check.measures import measure


def test_codes_of_activations_are_those_of_the_compiled_function():
    """Float64 activations fall on other sides of a tie than float32 ones; that is no fault."""

    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((64, 48), "float32"), w: R.Tensor((48, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                h = R.matmul(x, w)
                q = R.sits.fake_quantize(h, R.const(0.1, "float32"), bits=8)
                loss = R.mean(R.multiply(q, q))
                R.output(loss)
            return loss

    rng = np.random.default_rng(0)
    x = rng.integers(-9, 10, (64, 48)).astype("float32") / np.float32(10)  # h near multiples of s/2
    w = rng.integers(-9, 10, (48, 64)).astype("float32") / np.float32(20)
    exact = x.astype("float64") @ w
    flips = np.rint(exact / np.float32(0.1)) != np.rint((x @ w) / np.float32(0.1))
    assert flips.sum() > 0
    result = check_gradient_conservation(differentiate(Mod), inputs=[x], params={"w": w})
    assert result.ok, str(result)
    assert {row.vector for row in result.rows} == {"given"}


def test_a_gradient_below_the_noise_is_not_informative():
    """Softmax ignores a constant: the gradient of `shift` is zero up to rounding."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            x: R.Tensor((4, 8), "float32"),
            w: R.Tensor((8, 5), "float32"),
            shift: R.Tensor((1,), "float32"),
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.add(R.matmul(x, w), shift)
                p = R.nn.softmax(y)
                loss = R.mean(R.multiply(p, p))
                R.output(loss)
            return loss

    result = check_gradient_conservation(differentiate(Mod), seeds=[0, 1])
    assert result.ok, str(result)
    status = {row.name: set() for row in result.rows}
    for row in result.rows:
        status[row.name].add(row.status)
    assert status["w"] == {"pass"}
    assert status["shift"] == {"noise"}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_limits_follow_the_dtype(dtype):
    bb = relax.BlockBuilder()
    x, w = (relax.Var(n, relax.TensorType(s, dtype)) for n, s in (("x", (8, 32)), ("w", (16, 32))))
    with bb.function("main", [x, w], {"num_input": 1}):
        with bb.dataflow():
            q = bb.emit(R.sits.fake_quantize(w, relax.const(0.1, dtype)))
            y = bb.emit(O.matmul(x, bb.emit(O.permute_dims(q))))
            loss = bb.emit_output(O.mean(O.multiply(y, y)))
        bb.emit_func_output(loss)
    result = check_gradient_conservation(differentiate(bb.get()), seeds=[0])
    assert result.ok, str(result)
    assert {row.limit for row in result.rows} == {5e-3 if dtype == "float16" else 1e-5}
    assert {row.vector for row in result.rows} == {"seed 0", "clip edges", "ties"}


def clipped(bound):
    return lambda bb, w: squares(bb, bb.emit(O.clip(w, -bound, bound)))


def far_branch(bb, w):
    is_far = bb.emit(O.greater(w, relax.const(8.0)))
    return squares(bb, bb.emit(O.where(is_far, bb.emit(O.negative(w)), w)))


DECISIONS = [
    (clipped(50.0), ["R.clip.*no element is below -50", "R.clip.*no element is above 50"]),
    (clipped(float("inf")), []),
    (far_branch, ["R.greater.*no element is true"]),
    (
        lambda bb, w: squares(bb, bb.emit(O.maximum(w, relax.const(-9.0)))),
        ["R.maximum.*every element is larger in the first argument"],
    ),
    (
        lambda bb, w: O.sum(bb.emit(O.nn.relu(bb.emit(O.multiply(w, w))))),
        ["R.nn.relu.*every element is positive"],
    ),
    (lambda bb, w: O.sum(bb.emit(O.abs(w))), []),
]


@pytest.mark.parametrize(("loss", "said"), DECISIONS)
def test_a_decision_that_no_vector_decides_is_a_warning(loss, said):
    """The binding is named; seeds that decide both ways leave nothing to say."""
    mod = differentiate(one_function(loss, relax.TensorType((32,), "float32")))
    result = check_gradient_conservation(mod, seeds=[0, 1])
    assert result.ok
    for warning, words in zip(result.diagnostics, said, strict=True):
        assert (warning.code, warning.severity) == ("gate-undecided", "warning")
        assert re.search(words, warning.message)
        assert warning.binding in {b.var.name for b in mod["main"].body.blocks[0].bindings}


def test_an_adjoint_that_ignores_a_clip_passes_with_a_warning_and_fails_where_it_is_reached():
    """The gradient by hand is 2 w: right inside the bounds alone."""
    mod = by_hand(clipped(50.0), ones)
    inside = check_gradient_conservation(mod, seeds=[0])
    assert [d.code for d in inside.diagnostics] == ["gate-undecided"] * 2
    w = np.linspace(-60, 60, 8).astype("float32")
    outside = check_gradient_conservation(mod, params={"w": w}, fidelity=False)
    assert [d.code for d in outside.diagnostics] == ["gradient-wrong"]


def test_a_loss_whose_terms_cancel_is_noise():
    mod = differentiate(one_function(lambda bb, w: O.sum(w), relax.TensorType((4,), "float32")))
    w = np.array([1e6, 1.0, -1e6, 1e-2], "float32")
    assert check_gradient_conservation(mod, params={"a0": w}, fidelity=False).ok


def test_a_leak_through_the_clip_mask_is_never_noise():
    want, got = np.array([1.0, 0.0]), np.array([1.0, 1e-4])
    clipped = np.array([False, True])

    def noise() -> float:
        return 1e-4

    assert _status(measure(got, want, 1e-5), want, 1e-5, noise) == "noise"
    assert _status(measure(got, want, 1e-5, masked=clipped), want, 1e-5, noise) == "fail"
