"""The static walk names the binding where a gradient is lost; it runs nothing."""

import time

import pytest
import tvm_ffi
from tvm import IRModule, relax
from tvm.ir import Op
from tvm.ir.op import register_op_attr
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


class rule:
    """Another FPrimalGradient for an op, inside a `with`."""

    def __init__(self, op, gradient):
        self.op, self.gradient = op, gradient

    def __enter__(self):
        self.kept = Op.get(self.op).get_attr("FPrimalGradient")
        self._put(self.gradient)

    def __exit__(self, *_):
        self._put(self.kept)

    def _put(self, gradient):
        Op.get(self.op).reset_attr("FPrimalGradient")
        register_op_attr(self.op, "FPrimalGradient", gradient)


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
        return [Diagnostic.error("gradient-wrong", "a number differs", function=name)]

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


def layers(count, width=16):
    """A residual network of `count` layers, 12 bindings and 4 parameters each."""
    bb = relax.BlockBuilder()
    tensor = lambda *shape: relax.TensorType(shape, "float32")  # noqa: E731
    x = relax.Var("x", tensor(4, width))
    params = [
        relax.Var(f"{name}{i}", tensor(*shape))
        for i in range(count)
        for name, shape in {
            "w": (width, width), "s": (width,), "v": (width, width), "t": (width,)
        }.items()
    ]  # fmt: skip
    with bb.function("main", [x, *params], {"num_input": 1}):
        with bb.dataflow():
            h = x
            for i in range(count):
                w, s, v, t = params[4 * i : 4 * i + 4]
                for weight, scale in ((w, s), (v, t)):
                    quantized = bb.emit(R.sits.fake_quantize(weight, scale, axis=0))
                    y = bb.emit(O.matmul(h, bb.emit(O.permute_dims(quantized))))
                    h = bb.emit(O.add(h, bb.emit(O.nn.silu(y))))
                    h = bb.emit(O.nn.relu(h))
            loss = bb.emit_output(O.sum(h))
        bb.emit_func_output(loss)
    mod = bb.get()
    return relax.transform.Gradient("main", list(mod["main"].params[1:]))(mod)


def seconds(mod: IRModule) -> float:
    start = time.perf_counter()
    assert gradient_conservation_check(mod) == []
    return time.perf_counter() - start


def test_time_is_linear_in_the_number_of_bindings():
    small, large = layers(20), layers(80)
    bindings = [len(m["main_adjoint"].body.blocks[0].bindings) for m in (small, large)]
    assert bindings[1] > 4000
    fast = min(seconds(small) for _ in range(3))
    slow = min(seconds(large) for _ in range(3))
    print(f"\n{bindings[0]} bindings: {fast:.2f} s; {bindings[1]} bindings: {slow:.2f} s")
    assert slow < 10
    assert slow < 8 * fast


def all_cut(count: int) -> IRModule:
    """x + Σ floor(w) and its adjoint, in which the gradient of every w is zero."""
    ty = relax.TensorType((), "float32")
    params = [relax.Var(f"w{i}", ty) for i in range(count)]
    functions = {}
    for name in ("main", "main_adjoint"):
        bb, x, *ws = relax.BlockBuilder(), relax.Var("x", ty), *params
        args = [relax.Var(p.name, ty) for p in (x, *ws)]
        with bb.function(name, args):
            with bb.dataflow():
                total = args[0]
                for w in args[1:]:
                    total = bb.emit(O.add(total, bb.emit(O.floor(w))))
                result = loss = bb.emit(O.negative(total), "loss")
                if name == "main_adjoint":
                    seed = bb.emit(O.ones((), "float32"), "loss_adjoint")
                    zeros = [bb.emit(O.zeros((), "float32")) for _ in ws]
                    gradients = relax.Tuple([bb.emit(O.negative(seed)), *zeros])
                    result = relax.Tuple([loss, gradients])
                out = bb.emit_output(result)
            bb.emit_func_output(out)
        functions[name] = bb.get()[name]
    return IRModule(functions)


def test_time_is_linear_in_the_number_of_cut_parameters():
    def seconds(mod):
        start = time.perf_counter()
        codes = [(d.code, d.binding) for d in gradient_conservation_check(mod)]
        assert {code for code, _ in codes} == {"gradient-cut"}
        assert len(set(codes)) == len(mod["main"].params) - 1  # each at its own floor
        return time.perf_counter() - start

    small, large = all_cut(100), all_cut(800)
    fast, slow = (min(seconds(mod) for _ in range(2)) for mod in (small, large))
    print(f"\n100 parameters: {fast:.2f} s; 800 parameters: {slow:.2f} s")
    assert slow < 16 * fast


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
