"""The static walk names the binding where a gradient is lost; it runs nothing."""

import pytest
import tvm_ffi
from gradient_rules import rule
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes.gradient_conservation_check import (
    GradientConservationCheck,
    gradient_conservation_check,
)
from sits_tvm.diagnostics import Diagnostic, collect


@I.ir_module
class Linear:
    @R.function
    def main(
        x: R.Tensor((4, 8), "float32"),
        w: R.Tensor((3, 8), "float32"),
        b: R.Tensor((3,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            wt = R.permute_dims(w)
            product = R.matmul(x, wt)
            y = R.add(product, b)
            loss = R.mean(R.multiply(y, y))
            R.output(loss)
        return loss


def gradient(mod, *names):
    params = {p.name: p for p in mod["main"].params}
    return relax.transform.Gradient("main", [params[n] for n in names])(mod)


def replaced(mod, name, value):
    """`main_adjoint` with the binding `name` computing `value(old value)` instead."""
    func = mod["main_adjoint"]
    bb = relax.BlockBuilder()

    @relax.expr_functor.mutator
    class Replace(relax.PyExprMutator):
        def visit_var_binding_(self, binding):
            if binding.var.name != name:
                return super().visit_var_binding_(binding)
            new = self.builder_.emit(value(self.visit_expr(binding.value)), name)
            self.set_var_remap(binding.var, new)

    made = Replace(mod).visit_expr(func)
    out = mod.clone()
    out["main_adjoint"] = relax.Function(made.params, made.body, None, True, made.attrs)
    return out


def found(mod):
    return [(d.severity, d.code, d.binding) for d in gradient_conservation_check(mod)]


def test_finds_nothing_in_a_right_adjoint():
    mod = gradient(Linear, "w", "b")
    before = tvm_ffi.structural_hash(mod)
    assert found(mod) == []
    with collect() as notes:
        assert GradientConservationCheck()(mod).same_as(mod)
    assert notes == []
    assert tvm_ffi.structural_hash(mod) == before


def test_names_the_binding_where_the_path_is_cut():
    with rule("relax.permute_dims", lambda var, call, g, bb: [O.grad.no_grad(call.args[0])]):
        mod = gradient(Linear, "w", "b")
        (error,) = gradient_conservation_check(mod)
    assert (error.severity, error.code, error.binding) == ("error", "gradient-cut", "wt")
    assert error.function == "main_adjoint"
    assert error.ir.startswith("wt: R.Tensor((8, 3)")
    assert "`w`" in error.message
    assert "differentiate" in error.help
    (error,) = gradient_conservation_check(mod)  # with a right rule in its place nobody can tell
    assert error.binding == "y"
    assert error.message.endswith("cut between `w` and `y`: what arrives is a constant")


def test_says_which_gradient_rule_raises():
    """Nobody can tell whether it cuts the gradient: the error names the next op."""

    def refuse(var, call, g, bb):
        raise ValueError("no transposes today\nnor tomorrow")

    with rule("relax.permute_dims", lambda var, call, g, bb: [O.grad.no_grad(call.args[0])]):
        mod = gradient(Linear, "w", "b")
    with rule("relax.permute_dims", refuse):
        note, error = gradient_conservation_check(mod)
    assert (note.severity, note.code, note.binding) == ("note", "gradient-rule-failed", "wt")
    assert note.function == "main_adjoint"
    assert note.ir.startswith("wt: R.Tensor((8, 3)")
    said = "the gradient rule of relax.permute_dims raises ValueError: no transposes today; a grad"
    assert note.message.startswith(said)
    assert "FPrimalGradient" in note.help
    assert (error.code, error.binding) == ("gradient-cut", "y")


def test_names_the_cast_to_an_integer():
    """TVM's own rule for astype sends the gradient through the integer."""

    @I.ir_module
    class Mod:
        @R.function
        def main(w: R.Tensor((8,), "float32"), v: R.Tensor((8,), "float32")):
            with R.dataflow():
                q = R.astype(w, "int8")
                d = R.astype(q, "float32")
                loss = R.sum(R.multiply(d, v))
                R.output(loss)
            return loss

    with rule("relax.astype", lambda var, call, g, bb: [O.astype(g, str(call.args[0].ty.dtype))]):
        mod = gradient(Mod, "w", "v")
    (error,) = gradient_conservation_check(mod)
    assert (error.code, error.binding) == ("gradient-truncated", "q_adjoint")
    assert error.message == "the gradient of `w` passes through int8 at `q_adjoint`"


def test_names_the_narrowing_of_an_adjoint():
    mod = gradient(Linear, "w", "b")
    narrow = replaced(mod, "product_adjoint", lambda v: O.astype(O.astype(v, "float16"), "float32"))
    (error,) = gradient_conservation_check(narrow)
    assert error.code == "gradient-narrowed"
    assert "float16" in error.message


def test_float16_is_no_narrowing_where_the_value_is_float16():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((4, 8), "float16"), w: R.Tensor((8, 3), "float32")):
            with R.dataflow():
                half = R.astype(w, "float16")
                y = R.matmul(x, half)
                wide = R.astype(y, "float32")
                loss = R.sum(wide)
                R.output(loss)
            return loss

    assert found(gradient(Mod, "w")) == []


def test_names_a_partial_of_the_wrong_shape():
    """Gradient takes any shape that a rule returns."""
    total = lambda var, call, g, bb: [g, O.sum(g)]  # noqa: E731
    with rule("relax.add", total):
        mod = gradient(Linear, "w", "b")
    errors = gradient_conservation_check(mod)
    assert {e.code for e in errors} == {"gradient-shape"}
    assert errors[0].binding == "b_adjoint"
    assert 'R.Tensor((3,), dtype="float32") is wanted' in errors[0].message


def test_a_parameter_that_the_loss_does_not_use_is_a_warning():
    @I.ir_module
    class Mod:
        @R.function
        def main(w: R.Tensor((8,), "float32"), unused: R.Tensor((8,), "float32")):
            with R.dataflow():
                dead = R.add(unused, unused)
                loss = R.sum(w)
                R.output(loss)
            return loss

    assert found(gradient(Mod, "w", "unused")) == [("warning", "gradient-unused", "unused")]


def test_an_integer_parameter_is_an_error():
    @I.ir_module
    class Mod:
        @R.function
        def main(w: R.Tensor((8, 3), "float32"), ids: R.Tensor((4,), "int64")):
            with R.dataflow():
                loss = R.sum(R.take(w, ids, axis=0))
                R.output(loss)
            return loss

    assert found(relax.transform.Gradient("main")(Mod)) == [("error", "gradient-of-integer", "ids")]


@pytest.mark.parametrize("names", [["w"], ["w", "b", "c"], ["b", "nothing"]])
def test_names_that_do_not_fit_the_gradients_are_an_error(names):
    mod = gradient(Linear, "w", "b")
    (error,) = gradient_conservation_check(mod, require_grads=names)
    assert error.code == "gradient-of-what"
    assert "x, w, b" in error.message


def test_a_module_without_an_adjoint_is_an_error():
    (error,) = gradient_conservation_check(Linear)
    assert error.code == "no-adjoint"
    assert "sits_tvm.differentiate" in error.help
    with collect() as notes:
        GradientConservationCheck()(Linear)
    assert notes == []


def test_an_adjoint_that_returns_something_else_is_an_error():
    mod = gradient(Linear, "w").clone()
    mod["main_adjoint"] = Linear["main"].with_attr("global_symbol", "main_adjoint")
    assert found(mod) == [("error", "adjoint-result", "")]


def test_the_gate_runs_where_the_paths_are_whole():
    asked = []

    def gate(mod, name):
        asked.append(name)
        return [
            Diagnostic.error("gradient-wrong", "a number differs", function=name, help="see it")
        ]

    with collect() as notes:
        GradientConservationCheck(gate)(gradient(Linear, "w", "b"))
    assert [(n.severity, n.code) for n in notes] == [("error", "gradient-wrong")]
    with rule("relax.permute_dims", lambda var, call, g, bb: [O.grad.no_grad(call.args[0])]):
        cut = gradient(Linear, "w", "b")
    with collect() as notes:
        GradientConservationCheck(gate, severity="warning")(cut)
    assert [(n.severity, n.code) for n in notes] == [("warning", "gradient-cut")]
    assert asked == ["main"]


def test_refuses_an_unknown_severity():
    with pytest.raises(ValueError, match="'error' or 'warning'"):
        GradientConservationCheck(severity="note")


def test_parameters_with_dots_in_their_names():
    """A model from PyTorch; the variables of its gradients have underscores there."""
    bb = relax.BlockBuilder()
    names = ("block.0.weight", "block.1.weight")
    params = [relax.Var(n, relax.TensorType((3,), "float32")) for n in names]
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(O.sum(O.multiply(*params)))
        bb.emit_func_output(loss)
    mod = bb.get()
    assert found(relax.transform.Gradient("main", list(reversed(mod["main"].params)))(mod)) == []
