"""`check_gradient_conservation`: what passes, what is wrong, and what a build does with it."""

from __future__ import annotations

import json

import pytest
from gradient_modules import Network, by_hand, ones, squares
from gradient_rules import rule
from quantize_mutants import NAME, Mutant, gradient, identity, model
from small_modules import one_function
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from sits_tvm import Config, SitsError, check_gradient_conservation, differentiate


@pytest.fixture(scope="module")
def checked():
    return check_gradient_conservation(differentiate(Network))


def wrong_module():
    with rule(NAME, gradient(Mutant("wrong", identity))):
        return differentiate(model("main"))


def test_a_right_adjoint_passes(checked):
    assert checked.ok
    assert checked.diagnostics == []
    assert {row.status for row in checked.rows} == {"pass"}
    assert {row.vector for row in checked.rows} == {
        "seed 0", "seed 1", "seed 2", "clip edges", "ties"
    }  # fmt: skip
    assert {row.loss_scale for row in checked.rows} == {0.1, 1.0, 10.0}
    assert {row.name for row in checked.rows} >= {p.name for p in Network["main"].params[2:]}


def test_the_summary_is_by_operator_type(checked):
    summary = {row.operator: row for row in checked.summary()}
    assert {"matmul", "scale of matmul", "nn.layer_norm", "value of output"} <= set(summary)
    assert summary["matmul"].count == 2 * 5 * 3  # weights, vectors, loss scales
    assert summary["matmul"].pass_rate == 1.0
    assert summary["matmul"].relative_l2 < 1e-6
    assert summary["matmul"].clipped > 0.02


def test_prints_and_writes_json(checked):
    text = str(checked)
    assert text.startswith("main: gradients conserved")
    assert "scale of matmul" in text
    read = json.loads(checked.to_json())
    assert read["ok"] is True
    assert len(read["rows"]) == len(checked.rows)


def test_a_wrong_rule_is_named():
    result = check_gradient_conservation(wrong_module(), seeds=[0], loss_scales=[1.0])
    assert not result.ok
    (error,) = result.diagnostics
    assert (error.code, error.function, error.binding) == ("gradient-wrong", "main_adjoint", "w")
    assert "relative L2" in error.message
    assert "NOT conserved" in str(result)


def test_a_cut_path_stops_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr("sits_tvm.gradient_check.check.run_gate", None)
    cut = lambda var, call, g, bb: [O.grad.no_grad(a) for a in call.args]  # noqa: E731
    with rule(NAME, cut):
        base = model("main")
        mod = relax.transform.Gradient("main", list(base["main"].params[1:]))(base)
    result = check_gradient_conservation(mod)
    assert not result.ok
    assert {d.code for d in result.diagnostics} == {"gradient-cut"}
    assert result.rows == []


def test_an_adjoint_through_an_integer_is_found():
    """What TVM's rule for astype does to a quantization spelled with casts."""

    @I.ir_module
    class Mod:
        @R.function
        def main(w: R.Tensor((64,), "float32"), v: R.Tensor((64,), "float32")):
            with R.dataflow():
                scaled = R.multiply(w, R.const(3.0, "float32"))
                q = R.astype(scaled, "int8")
                d = R.astype(q, "float32")
                loss = R.sum(R.multiply(d, v))
                R.output(loss)
            return loss

    through = lambda var, call, g, bb: [O.astype(g, str(call.args[0].ty.dtype))]  # noqa: E731
    with rule("relax.astype", through):
        mod = relax.transform.Gradient("main", list(Mod["main"].params))(Mod)
    assert [d.code for d in check_gradient_conservation(mod).diagnostics] == ["gradient-truncated"]


def test_an_adjoint_written_by_hand_is_checked_at_one_loss_scale():
    @I.ir_module
    class Mod:
        @R.function
        def main(w: R.Tensor((8,), "float32")):
            with R.dataflow():
                loss = R.sum(R.multiply(w, w))
                R.output(loss)
            return loss

        @R.function
        def main_adjoint(w: R.Tensor((8,), "float32")):
            with R.dataflow():
                loss = R.sum(R.multiply(w, w))
                dw = R.multiply(w, R.const(2.0, "float32"))
                R.output(loss, dw)
            return (loss, (dw,))

    result = check_gradient_conservation(Mod, require_grads=["w"])
    assert result.ok
    assert [d.code for d in result.diagnostics] == ["gradient-seed"]
    assert {row.loss_scale for row in result.rows} == {1.0}


@pytest.mark.parametrize(("gate", "severities"), [("fail", None), ("report", {"warning"})])
def test_a_build_can_fail_on_the_gate(gate, severities):
    mod, config = wrong_module(), Config(gradient_gate=gate)
    if severities is None:
        with pytest.raises(SitsError, match="gradient-wrong"):
            sits_tvm.lower(mod, "llvm -mcpu=native", config=config)
        return
    _, report = sits_tvm.lower(mod, "llvm -mcpu=native", config=config)
    assert {d.severity for d in report.diagnostics if d.code == "gradient-wrong"} == severities
    assert {row.operator for row in report.gradients} >= {"matmul", "scale of matmul"}
    assert "gradients against their float64 reference" in str(report)
    assert sits_tvm.Report.from_json(report.to_json()).gradients == report.gradients


@pytest.mark.parametrize("start", [2.0, -1.0])
def test_a_gradient_that_starts_elsewhere_than_at_one_is_wrong(start):
    mod = by_hand(squares, lambda: O.full((), relax.const(start), "float32"))
    assert check_gradient_conservation(by_hand(squares, ones), seeds=[0]).ok
    result = check_gradient_conservation(mod, seeds=[0])
    assert "gradient-wrong" in {d.code for d in result.diagnostics}


def test_what_the_adjoint_returns_beside_the_gradients_is_compared():
    mod = by_hand(squares, ones, forward=lambda bb, w: O.sum(w))
    (error,) = check_gradient_conservation(mod, seeds=[0]).diagnostics
    assert (error.code, error.function) == ("value-wrong", "main_adjoint")


def test_a_constant_index_from_the_end_and_a_tensor_without_elements():
    last = relax.const([-1, 0], "int64")
    mod = one_function(
        lambda bb, w: O.sum(bb.emit(O.sin(bb.emit(O.take(w, last, 0))))),
        relax.TensorType((3, 4), "float32"),
    )
    assert check_gradient_conservation(differentiate(mod), seeds=[0]).ok
    empty = one_function(
        lambda bb, w: O.sum(bb.emit(O.exp(w))), relax.TensorType((0, 4), "float32")
    )
    assert check_gradient_conservation(differentiate(empty), seeds=[0]).ok
