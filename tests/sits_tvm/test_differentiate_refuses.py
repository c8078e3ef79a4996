"""differentiate: what it refuses by name, and what to write instead."""

import numpy as np
import pytest
from small_losses import VECTOR, X, errors_of, loss_of, run
from small_modules import one_function
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from sits_tvm import SitsError, differentiate
from sits_tvm.diagnostics import collect


def test_lists_every_op_without_a_gradient():
    def make(bb, x):
        doubled = bb.emit(relax.op.prod(x, keepdims=True))
        return relax.op.multiply(bb.emit(relax.op.nn.dropout(doubled)[0]), x)

    found = errors_of(loss_of(make, VECTOR))
    assert [e.code for e in found] == ["gradient-missing"] * 2
    assert ["R.prod" in found[0].message, "R.nn.dropout" in found[1].message] == [True, True]
    assert all(e.binding and e.ir and e.help for e in found)


def test_a_cast_to_an_integer_is_an_error_not_a_truncation():
    def make(bb, x):
        codes = bb.emit(relax.op.astype(x, "int8"))
        return relax.op.astype(codes, "float32")

    (error,) = errors_of(loss_of(make, VECTOR))
    assert (error.code, error.binding) == ("gradient-through-integer", "lv")
    assert "float32 to int8" in error.message
    assert "fake_quantize" in error.help


def test_a_gradient_that_is_cut_is_an_error_where_it_was_asked_for():
    def make(bb, x, w):
        return relax.op.multiply(bb.emit(relax.op.floor(w)), x)

    mod = loss_of(make, VECTOR, VECTOR)
    (error,) = errors_of(mod, require_grads=["a1"])
    assert (error.code, error.binding) == ("gradient-cut", "lv")
    with collect() as found:
        _, (dx, dw) = run(differentiate(mod), "main_adjoint", X, X + 0.25)
    assert [(d.severity, d.code, d.binding) for d in found][:1] == [
        ("warning", "gradient-zero", "a1")
    ]
    assert "`lv`" in found[0].message
    np.testing.assert_allclose(dx.numpy(), np.floor(X + 0.25))
    assert not dw.numpy().any()


def test_an_unused_parameter_has_a_zero_gradient_and_a_warning():
    mod = loss_of(lambda bb, x, w: relax.op.exp(x), VECTOR, VECTOR)
    with collect() as found:
        result = differentiate(mod, require_grads=["a1"])
    assert [d.code for d in found] == ["gradient-zero"]
    _, (gradient,) = run(result, "main_adjoint", X, X)
    assert not gradient.numpy().any()


def test_require_grads_names_every_fault():
    mod = loss_of(lambda bb, x, i: relax.op.take(x, i, 0), VECTOR, relax.TensorType([2], "int64"))
    found = errors_of(mod, require_grads=["a1", "w", "a0", "a0"])
    assert [e.code for e in found] == ["require-grads"] * 3
    messages = " ".join(e.message for e in found)
    assert all(word in messages for word in ("'a1'", "only floats", "'w' is no argument", "twice"))
    (error,) = errors_of(mod, require_grads=relax.Var("a0", VECTOR))
    assert "no argument" in error.message


def test_a_name_of_two_arguments_is_no_choice():
    bb, params = relax.BlockBuilder(), [relax.Var("w", VECTOR), relax.Var("w", VECTOR)]
    with bb.function("main", params):
        bb.emit_func_output(bb.emit(relax.op.sum(bb.emit(relax.op.multiply(*params)))))
    (error,) = errors_of(bb.get(), require_grads="w")
    assert "2 arguments are named 'w'" in error.message


def test_a_pool_that_the_gradient_kernel_cannot_do_is_named():
    maps = relax.TensorType([1, 2, 5, 5], "float32")
    mod = loss_of(lambda bb, x: relax.op.nn.max_pool2d(x, 2, dilation=2), maps)
    (error,) = errors_of(mod)
    assert "dilation [2, 2]" in error.message
    assert error.binding


@pytest.mark.parametrize(
    ("ty", "words"), [(VECTOR, "R.Tensor((4,)"), (relax.TensorType([], "int32"), "int32")]
)
def test_a_loss_that_is_no_float_scalar_says_what_to_write(ty, words):
    (error,) = errors_of(one_function(lambda bb, x, _: relax.op.add(x, x), ty, VECTOR))
    assert error.code == "loss-not-scalar"
    assert words in error.message
    assert "R.mean" in error.help


@I.ir_module
class Branch:
    @R.function
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((), "float32"):
        if c:  # noqa: SIM108, an If of Relax
            y = R.exp(x)
        else:
            y = R.sin(x)
        z = R.sum(y)
        return z


@I.ir_module
class Recursion:
    @R.function
    def main(x: R.Tensor((), "float32")) -> R.Tensor((), "float32"):
        cls = Recursion
        y: R.Tensor((), "float32") = cls.main(x)
        z = R.exp(y)
        return z


@I.ir_module
class Kernel:
    @T.prim_func(s_tir=True)
    def double(x: T.Buffer((T.int64(4),), "float32"), y: T.Buffer((T.int64(4),), "float32")):
        for i in range(T.int64(4)):
            with T.sblock("double"):
                v = T.axis.spatial(T.int64(4), i)
                y[v] = x[v] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((), "float32"):
        cls = Kernel
        with R.dataflow():
            y = R.call_tir(cls.double, (x,), out_ty=R.Tensor((4,), "float32"))
            z = R.sum(y)
            R.output(z)
        return z


@pytest.mark.parametrize(
    ("mod", "code", "binding"),
    [
        (Branch, "gradient-impure", "y"),
        (Recursion, "gradient-of-call", "y"),
        (Kernel, "gradient-missing", "y"),
    ],
)
def test_what_gradient_skips_or_dies_on_is_an_error(mod, code, binding):
    (error,) = errors_of(mod)
    assert (error.code, error.function, error.binding) == (code, "main", binding)
    assert error.help


def test_no_such_function():
    assert "'loss'" in errors_of(loss_of(lambda bb, x: x, VECTOR), "loss")[0].message


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda mod: mod["main"], {}, "expected an IRModule, got a Function.*\nhelp: give the"),
        (lambda mod: None, {}, "expected an IRModule, got a NoneType"),
        (lambda mod: mod, {"func": 3}, "func is a int, not the name"),
        (lambda mod: mod, {"require_grads": 5}, "require_grads is a int: 5"),
        (lambda mod: mod, {"require_grads": [5]}, "5.* is no argument"),
        (lambda mod: mod, {"target_index": "0"}, "target_index is a str: '0'"),
        *(
            (lambda mod, n=n: with_num_input(mod, n), {}, f"num_input is {n!r}; main has 1")
            for n in (-1, 2, "1")
        ),
    ],
)
def test_says_what_to_write_for_what_is_no_module_or_no_name(change, options, said):
    mod = loss_of(lambda bb, x: x, VECTOR)
    with pytest.raises(SitsError, match=said):
        differentiate(change(mod), **options)


def with_num_input(mod, inputs):
    mod["main"] = mod["main"].with_attr("num_input", inputs)
    return mod
