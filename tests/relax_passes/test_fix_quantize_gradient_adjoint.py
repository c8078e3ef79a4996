"""FixQuantizeGradient after Gradient: wrong adjoints are made anew, right and edited ones stay."""

import re
from contextlib import ExitStack

import numpy as np
import pytest
import tvm
from gradient_rules import rule
from quantize_forms import Builder, const, one_function, op_names
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.relax.op._op_gradient import sum_grad
from tvm.relax.op.grad import no_grad
from tvm.relax.utils import copy_with_new_vars

from relax_passes.fix_quantize_gradient import FixQuantizeGradient
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report

INPUT, WEIGHT, SCALES = ((4, 8), "float32"), ((8, 16), "float32"), ((8, 1), "float32")
SHAPES = [INPUT, WEIGHT, SCALES]
ZERO = ((8, 1), "float32")


def through_integers(b, x, w, s):
    codes = b.astype(b.clip(b.round(b.divide(w, s)), -8, 7), "int8")
    return loss(b, x, b.multiply(b.astype(codes, "float32"), s))


def in_floats(b, x, w, s):
    return loss(b, x, b.multiply(b.clip(b.round(b.divide(w, s)), -8, 7), s))


def by_quantize(b, x, w, s):
    scale, zero = b.reshape(s, (8,)), const(0, "int8")
    codes = b.clip(b.quantize(w, scale, zero, axis=0, out_dtype="int8"), -8, 7)
    return loss(b, x, b.dequantize(codes, scale, zero, axis=0, out_dtype="float32"))


def with_zero_point(b, x, w, s, z):
    code = b.clip(b.round(z), -8, 7)
    codes = b.clip(b.add(b.round(b.divide(w, s)), code), -8, 7)
    return loss(b, x, b.multiply(b.subtract(codes, code), s))


def activations_too(b, x, w, s):
    """Two sites, one behind the other."""
    step = const(0.25)
    hidden = b.multiply(b.clip(b.round(b.divide(b.tanh(x), step)), -2, 1), step)
    return in_floats(b, hidden, w, s)


def loss(b, x, w):
    y = b.matmul(x, w)
    return b.sum(b.multiply(y, b.tanh(y)))


def identity(var, call, g, bb):
    return [g, *map(no_grad, call.args[1:])]


def truncated(var, call, g, bb):
    """TVM's own rule of astype."""
    return [relax.op.astype(g, str(call.args[0].ty.dtype))]


def zero(var, call, g, bb):
    return [relax.op.zeros(call.args[0].ty.shape, "float32"), *map(no_grad, call.args[1:])]


def without_scale(var, call, g, bb):
    return [relax.op.negative(g), *map(no_grad, call.args[1:])]


WRONG = [
    ("identity", in_floats, {"clip": identity}),
    ("identity, quantize", by_quantize, {"quantize": identity, "dequantize": identity}),
    ("cast to an integer", through_integers, {"astype": truncated}),
    ("zero", in_floats, {"round": zero}),
    ("sign and scale", by_quantize, {"dequantize": without_scale, "clip": identity}),
    ("zero point", with_zero_point, {"clip": identity, "round": zero}),
    ("two sites", activations_too, {"clip": identity}),
    ("TVM's own sum", in_floats, {"clip": identity, "sum": sum_grad}),
    ("right, in many ops", in_floats, {}),
]


def shapes_of(spell):
    return [*SHAPES, *([ZERO] if spell is with_zero_point else [])]


def differentiated(spell, rules, target_index=0):
    mod = one_function(spell, *shapes_of(spell))
    with ExitStack() as stack:
        for name, gradient in rules.items():
            stack.enter_context(rule(f"relax.{name}", gradient))
        return relax.transform.Gradient("main", None, target_index)(mod)


def arguments(spell, rng):
    s = np.exp(rng.uniform(-1, 0, SCALES[0])).astype("float32")
    codes = rng.integers(-12, 12, WEIGHT[0]) + rng.uniform(-0.4, 0.4, WEIGHT[0])
    x = rng.standard_normal(INPUT[0]).astype("float32")
    zeros = [rng.uniform(-3, 3, ZERO[0]).astype("float32")] if spell is with_zero_point else []
    return [x, (codes * s).astype("float32"), s, *zeros]


def gradients(mod, args):
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    return [g.numpy() for g in vm["main_adjoint"](*map(tvm.runtime.tensor, args))[1]]


def reference(spell, args):
    """Float64 torch, straight through the rounding."""
    torch = pytest.importorskip("torch")
    x, w, s, *rest = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in args)

    def fake(x, s, lo, hi, z=0.0):
        ratio = x / s
        r = ratio + (torch.round(ratio) - ratio).detach()
        return ((r + z).clamp(lo, hi) - z) * s

    hidden = fake(torch.tanh(x), 0.25, -2, 1) if spell is activations_too else x
    z = rest[0] + (torch.round(rest[0]) - rest[0]).detach() if rest else 0.0
    y = hidden @ fake(w, s, -8, 7, z)
    (y * torch.tanh(y)).sum().backward()
    return [v.grad.numpy() for v in (x, w, s, *rest)]


def error(got, want):
    return max(np.linalg.norm(g - w) / np.linalg.norm(w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(("spell", "rules"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_the_adjoint_has_the_gradients_of_the_surrogate(spell, rules, rng):
    before, args, report = differentiated(spell, rules), arguments(spell, rng), Report()
    want = reference(spell, args)
    assert bool(rules) == (error(gradients(before, args), want) > 1e-2)
    after = FixQuantizeGradient(report=report)(before)
    assert error(gradients(after, args), want) < 1e-5
    assert "sits.fake_quantize_grad" in op_names(after["main_adjoint"])
    rows = [r for r in report.quantize_sites if r.function == "main_adjoint"]
    assert [row.fixed for row in rows] == [True] * (2 if spell is activations_too else 1)
    assert_structural_equal(FixQuantizeGradient()(after), after)


def test_a_right_adjoint_is_left_alone():
    """It is made of the op: the fix adds nothing."""
    mod = FixQuantizeGradient()(one_function(in_floats, *shapes_of(in_floats)))
    mod = relax.transform.Gradient("main")(mod)
    assert FixQuantizeGradient()(mod).same_as(mod)


def test_only_some_gradients_of_the_second_output(rng):
    bb = relax.BlockBuilder()
    x, w, s = (relax.Var(n, relax.TensorType(*t)) for n, t in zip("xws", SHAPES, strict=True))
    with bb.function("main", [x, w, s]):
        with bb.dataflow():
            first = bb.emit_output(relax.op.tanh(x))
            second = bb.emit_output(in_floats(Builder(bb), x, w, s))
        bb.emit_func_output(relax.Tuple([first, second]))
    with rule("relax.clip", identity):
        mod = relax.transform.Gradient("main", [s, w], 1)(bb.get())
    args = arguments(in_floats, rng)
    _, dw, ds = reference(in_floats, args)
    assert error(gradients(FixQuantizeGradient()(mod), args), [ds, dw]) < 1e-5


def test_an_adjoint_without_its_function(rng):
    mod = differentiated(in_floats, {"clip": identity})
    alone = tvm.IRModule({mod.get_global_var("main_adjoint"): mod["main_adjoint"]})
    args = arguments(in_floats, rng)
    after = FixQuantizeGradient()(alone)
    assert error(gradients(after, args), reference(in_floats, args)) < 1e-5


EDITS = {
    "loss scale": ("_adjoint: R.Tensor((), dtype=\"float32\") = R.ones(R.shape([])",
                   "_adjoint: R.Tensor((), dtype=\"float32\") = "
                   "R.full(R.shape([]), R.const(8.0, \"float32\")"),
    "scaled gradient": ("= a1_adjoint\n", "= R.negative(a1_adjoint)\n"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_adjoint_is_refused(edit):
    """What was changed by hand would be lost."""
    old, new = EDITS[edit]
    text = differentiated(in_floats, {"clip": identity}).script()
    assert text.count(old) == 1
    mod, report = tvm.script.from_source(text.replace(old, new)), Report()
    with collect() as found:
        after = FixQuantizeGradient(report=report)(mod)
    assert_structural_equal(after["main_adjoint"], mod["main_adjoint"])
    assert [d.code for d in found] == ["adjoint-not-repaired"]
    row = report.quantize_sites[-1]
    assert (row.function, row.fixed) == ("main_adjoint", False)
    assert "besides quantization it is not what Gradient makes" in row.reason


@pytest.mark.parametrize("op", ["negative", "sign", "tanh"])
def test_arithmetic_on_a_gradient_is_an_edit(op):
    """Of the input, which no quantization lies before."""
    text = differentiated(in_floats, {"clip": identity}).script()
    edited, count = re.subn(r"( a0_adjoint: .* = )(.*)\n", rf"\1R.{op}(\2)\n", text)
    assert count == 1
    with collect() as found:
        FixQuantizeGradient()(tvm.script.from_source(edited))
    assert ["at `a0`" in d.message for d in found] == [True]


def test_a_gradient_of_a_gradient_is_refused():
    mod = differentiated(in_floats, {"clip": identity})
    again = copy_with_new_vars(mod["main_adjoint"]).with_attr(
        "global_symbol", "main_adjoint_adjoint"
    )
    mod = mod.clone()
    mod["main_adjoint_adjoint"] = again
    report = Report()
    with collect():
        FixQuantizeGradient(report=report)(mod)
    (row,) = [r for r in report.quantize_sites if r.function == "main_adjoint_adjoint"]
    assert "differentiate that again" in row.reason
