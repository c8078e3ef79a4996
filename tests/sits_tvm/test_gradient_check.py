"""`check_gradient_conservation`: what it takes, what it says, and what a build does with it."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
import torch
from gradient_rules import rule
from quantize_mutants import NAME, Mutant, gradient, identity, model
from small_modules import one_function
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from sits_tvm import Config, SitsError, check_gradient_conservation, differentiate
from sits_tvm.gradient_check._comparison import _status
from sits_tvm.gradient_check._torch_values import to_torch
from sits_tvm.gradient_check.fidelity import hessian_vector_product, without_fake_quantize
from sits_tvm.gradient_check.measures import measure
from sits_tvm.gradient_check.twin import Twin
from sits_tvm.pipeline import run_on_host


@I.ir_module
class Network:
    """Weights per group and per channel, an activation quantized per tensor, a loss of classes."""

    @R.function
    def main(
        x: R.Tensor((8, 32), "float32"),
        labels: R.Tensor((8,), "int64"),
        up: R.Tensor((16, 32), "float32"),
        up_scale: R.Tensor((16, 2), "float32"),
        gain: R.Tensor((16,), "float32"),
        shift: R.Tensor((16,), "float32"),
        act_scale: R.Tensor((), "float32"),
        head: R.Tensor((6, 16), "float32"),
        head_scale: R.Tensor((6,), "float32"),
    ):
        R.func_attr({"num_input": 2})
        with R.dataflow():
            upq = R.sits.fake_quantize(up, up_scale, group_size=16)
            h = R.matmul(x, R.permute_dims(upq))
            n = R.nn.layer_norm(h, gain, shift, axes=[-1])
            a = R.nn.gelu(n)
            q = R.sits.fake_quantize(a, act_scale, bits=8)
            headq = R.sits.fake_quantize(head, head_scale, axis=0)
            logits = R.matmul(q, R.permute_dims(headq))
            loss = R.nn.nll_loss(R.nn.log_softmax(logits), labels)
            R.output(loss, logits)
        return (loss, logits)


@I.ir_module
class Small:
    @R.function
    def main(
        x: R.Tensor((8, 32), "float32"),
        labels: R.Tensor((8,), "int64"),
        up: R.Tensor((16, 32), "float32"),
        head: R.Tensor((6, 16), "float32"),
    ):
        R.func_attr({"num_input": 2})
        with R.dataflow():
            upq = R.sits.fake_quantize(up, R.const(0.05, "float32"))
            a = R.nn.gelu(R.matmul(x, R.permute_dims(upq)))
            headq = R.sits.fake_quantize(head, R.const(0.05, "float32"))
            logits = R.matmul(a, R.permute_dims(headq))
            loss = R.nn.nll_loss(R.nn.log_softmax(logits), labels)
            R.output(loss)
        return loss


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


def test_refuses_arguments_that_do_not_fit():
    mod = differentiate(Network)
    bad = {"up": np.zeros((16, 31), "float32"), "head": np.zeros((6, 16)), "haed": np.zeros(1)}
    with pytest.raises(SitsError) as caught:
        check_gradient_conservation(mod, params=bad)
    assert len(caught.value.diagnostics) == 3
    assert "`up` is float32 (16, 31)" in str(caught.value)
    assert "'haed'" in str(caught.value)
    with pytest.raises(SitsError, match="12 inputs for 9 arguments"):
        check_gradient_conservation(mod, inputs=[np.zeros(1)] * 12)


def test_refuses_a_module_without_an_adjoint():
    with pytest.raises(SitsError, match=r"no-adjoint.*\n.*\n.*sits_tvm.differentiate"):
        check_gradient_conservation(Network)
    with pytest.raises(SitsError, match="expected an IRModule, got a Function"):
        check_gradient_conservation(Network["main"])


def test_asks_for_arguments_of_symbolic_shape():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8, 4), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                loss = R.sum(R.matmul(x, w))
                R.output(loss)
            return loss

    mod = differentiate(Mod)
    with pytest.raises(SitsError, match="static shape: x"):
        check_gradient_conservation(mod)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
    assert check_gradient_conservation(mod, inputs=[x], seeds=[0]).ok


def test_says_what_to_install(monkeypatch):
    mod = differentiate(Network)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SitsError, match="pip install torch"):
        check_gradient_conservation(mod)


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


def draw(rng):
    return {
        p.name: rng.integers(0, 6, 8)
        if p.name == "labels"
        else rng.standard_normal([int(d) for d in p.ty.shape]).astype("float32") / 4
        for p in Small["main"].params
    }


def test_the_hessian_vector_product_is_right_and_not_zero(rng):
    weights = ["up", "head"]
    plain = without_fake_quantize(differentiate(Small), "main", weights)
    run = run_on_host(hessian_vector_product(plain, "main", weights))
    args = draw(rng)
    vectors = {w: rng.standard_normal(args[w].shape).astype("float32") for w in weights}
    _, products = run("main_directional_adjoint", [*args.values(), *vectors.values()])

    twin = Twin(plain, "main")
    values = {name: to_torch(value) for name, value in args.items()}

    def loss(*changed):
        tensors = {**values, **dict(zip(weights, changed, strict=True))}
        return twin.run(list(tensors.values())).outputs

    inputs = tuple(values[w] for w in weights)
    direction = tuple(to_torch(v) for v in vectors.values())
    _, reference = torch.autograd.functional.hvp(loss, inputs, direction)
    for got, want in zip(products, reference, strict=True):
        assert torch.linalg.norm(want) > 1e-3
        error = torch.linalg.norm(to_torch(got) - want) / torch.linalg.norm(want)
        assert error < 1e-5


def test_the_report_compares_with_float_weights(rng):
    """Gap and first-order term against float64 autograd of the twins."""
    args = draw(rng)
    mod = differentiate(Small)
    result = check_gradient_conservation(mod, params=args, loss_scales=[1.0])
    assert result.ok
    assert [row.name for row in result.fidelity] == ["up", "head"]
    assert "INT4 against float weights, 2 weights" in str(result)

    weights = ["up", "head"]
    quantized, plain = Twin(mod, "main"), Twin(without_fake_quantize(mod, "main", weights), "main")
    at_int4 = gradients(quantized, args, weights)
    at_float = gradients(plain, args, weights)
    for row, got, want in zip(result.fidelity, at_int4, at_float, strict=True):
        gap = torch.linalg.norm(got - want) / torch.linalg.norm(want)
        assert row.relative_l2 == pytest.approx(gap.item(), rel=1e-4)
        assert 0 < row.residual < 1
        clipped = np.abs(np.rint(args[row.name] / np.float32(0.05)) + 0.5) > 8
        assert row.clipped == pytest.approx(clipped.mean())


def gradients(twin, args, weights):
    tensors = {name: to_torch(value) for name, value in args.items()}
    leaves = [tensors[w].requires_grad_() for w in weights]
    return torch.autograd.grad(twin.run(list(tensors.values())).outputs, leaves)


def by_hand(loss, seed, forward=None):
    """main(w) = loss(w), and an adjoint that returns 2 w times `seed`."""
    bb = relax.BlockBuilder()
    for name in ("main", "main_adjoint"):
        w = relax.Var("w", relax.TensorType((8,), "float32"))
        with bb.function(name, [w]):
            value = bb.emit((forward or loss)(bb, w) if name == "main_adjoint" else loss(bb, w))
            if name == "main":
                bb.emit_func_output(value)
                continue
            start = bb.emit(seed(), "gv_adjoint")
            found = bb.emit(O.multiply(bb.emit(O.add(w, w)), start), "w_adjoint_out")
            bb.emit_func_output(relax.Tuple([value, relax.Tuple([found])]))
    return bb.get()


def squares(bb, w):
    return O.sum(bb.emit(O.multiply(w, w)))


def ones():
    return O.ones((), "float32")


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


@pytest.mark.parametrize("options", [{"seeds": []}, {"loss_scales": []}, {"loss_scales": [0.0]}])
def test_refuses_to_compare_nothing(options):
    with pytest.raises(SitsError) as error:
        check_gradient_conservation(by_hand(squares, ones), **options)
    assert error.value.diagnostics[0].code == "check-options"


def test_a_function_that_is_not_defined_at_its_arguments_is_not_called_wrong():
    mod = differentiate(
        one_function(lambda bb, w: O.sum(bb.emit(O.log(w))), relax.TensorType((8,), "float32"))
    )
    with pytest.raises(SitsError) as error:
        check_gradient_conservation(mod, params={"a0": np.zeros(8, "float32") - 1})
    assert error.value.diagnostics[0].code == "loss-not-finite"


def test_a_loss_whose_terms_cancel_is_noise():
    mod = differentiate(one_function(lambda bb, w: O.sum(w), relax.TensorType((4,), "float32")))
    w = np.array([1e6, 1.0, -1e6, 1e-2], "float32")
    assert check_gradient_conservation(mod, params={"a0": w}, fidelity=False).ok


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


def test_a_leak_through_the_clip_mask_is_never_noise():
    want, got = np.array([1.0, 0.0]), np.array([1.0, 1e-4])
    clipped = np.array([False, True])

    def noise() -> float:
        return 1e-4

    assert _status(measure(got, want, 1e-5), want, 1e-5, noise) == "noise"
    assert _status(measure(got, want, 1e-5, masked=clipped), want, 1e-5, noise) == "fail"
