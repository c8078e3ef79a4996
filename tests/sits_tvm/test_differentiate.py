"""differentiate: what it accepts, what it adds, and what it refuses by name."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from small_modules import one_function
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from sits_tvm import SitsError, build, differentiate
from sits_tvm.diagnostics import collect

VECTOR = relax.TensorType([4], "float32")
X = np.array([1.0, -2.0, 3.0, 0.5], "float32")


def loss_of(make, *types, num_input=None):
    """main(a0, a1, …) = Σ of what `make` emits."""
    return one_function(
        lambda bb, *xs: relax.op.sum(bb.emit(make(bb, *xs))), *types, num_input=num_input
    )


def run(mod, name, *arrays):
    only = {gv: f for gv, f in mod.functions.items() if gv.name_hint == name}
    vm = relax.VirtualMachine(build(tvm.IRModule(only), "llvm"), tvm.cpu())
    return vm[name](*map(tvm.runtime.tensor, arrays))


def errors_of(mod, *args, **options):
    with pytest.raises(SitsError) as caught:
        differentiate(mod, *args, **options)
    return caught.value.diagnostics


@I.ir_module
class Calls:
    @R.function
    def square(x: R.Tensor(("k", 4), "float32")) -> R.Tensor(("k", 4), "float32"):
        k = T.int64()
        with R.dataflow():
            flat = R.reshape(x, R.shape([k * 4]))
            y = R.reshape(R.multiply(flat, flat), R.shape([k, 4]))
            R.output(y)
        return y

    @R.function
    def main(x: R.Tensor(("n", 4), "float32")) -> R.Tensor((), "float32"):
        cls = Calls
        y = cls.square(x)
        z = R.sum(y)
        return z


def test_inlines_public_functions_with_symbolic_shapes():
    """Not in a dataflow block, and the callee has shape expressions of its own variable."""
    digest = tvm_ffi.structural_hash(Calls)
    mod = differentiate(Calls)
    assert tvm_ffi.structural_hash(Calls) == digest
    assert {gv.name_hint for gv in mod.functions} == {"main", "square", "main_adjoint"}
    for n in (1, 3):
        x = np.arange(4 * n, dtype="float32").reshape(n, 4)
        loss, (gradient,) = run(mod, "main_adjoint", x)
        np.testing.assert_allclose(loss.numpy(), (x * x).sum())
        np.testing.assert_allclose(gradient.numpy(), 2 * x)


def test_differentiating_twice_is_the_hessian():
    """The public adjoint is inlined: TVM's Gradient would see a call, and give zeros."""
    mod = differentiate(loss_of(lambda bb, x: relax.op.exp(x), VECTOR))
    bb = relax.BlockBuilder(mod)
    x, v = relax.Var("x", VECTOR), relax.Var("v", VECTOR)
    with bb.function("hv", [x, v]):
        with bb.dataflow():
            result = bb.emit(relax.Call(mod.get_global_var("main_adjoint"), [x]))
            gradient = bb.emit(bb.emit(result[1])[0])
            out = bb.emit_output(relax.op.sum(bb.emit(relax.op.multiply(gradient, v))))
        bb.emit_func_output(out)
    twice = differentiate(bb.get(), "hv", "x")
    _, (product,) = run(twice, "hv_adjoint", X, X)
    np.testing.assert_allclose(product.numpy(), np.exp(X) * X, rtol=1e-6)


def test_an_old_adjoint_is_replaced():
    mod = loss_of(lambda bb, x, y: relax.op.multiply(x, y), VECTOR, VECTOR)
    again = differentiate(differentiate(mod, require_grads="a0"), require_grads=["a1", "a0"])
    assert len(again.functions) == 2
    _, (dy, dx) = run(again, "main_adjoint", X, 2 * X)
    np.testing.assert_allclose([dy.numpy(), dx.numpy()], [X, 2 * X])


def test_default_is_every_float_after_the_inputs():
    indices = relax.TensorType([2], "int64")

    def make(bb, x, i, w):
        return relax.op.take(bb.emit(relax.op.multiply(x, w)), i, 0)

    mod = loss_of(make, VECTOR, indices, VECTOR, num_input=1)
    main = differentiate(mod)["main_adjoint"]
    assert len(main.ret_ty.fields[1].fields) == 1
    assert main.attrs["num_input"] == 1
    whole = mod.clone()
    whole["main"] = mod["main"].without_attr("num_input")
    assert len(differentiate(whole)["main_adjoint"].ret_ty.fields[1].fields) == 2


def test_a_frozen_branch_needs_no_gradient():
    """R.prod has none, and lies on no path to the parameter; nor is its adjoint computed."""

    def make(bb, x, w):
        return relax.op.multiply(bb.emit(relax.op.prod(x, keepdims=True)), w)

    mod = differentiate(loss_of(make, VECTOR, VECTOR), require_grads="a1")
    _, (gradient,) = run(mod, "main_adjoint", X, X)
    np.testing.assert_allclose(gradient.numpy(), np.full(4, X.prod()))
    (error,) = errors_of(loss_of(make, VECTOR, VECTOR))
    assert (error.code, error.function, error.binding) == ("gradient-missing", "main", "lv")
    assert "R.prod has no gradient" in error.message


def test_a_parameter_used_twice_gets_the_sum():
    def make(bb, w):
        return relax.op.add(bb.emit(relax.op.exp(w)), bb.emit(relax.op.multiply(w, w)))

    _, (gradient,) = run(differentiate(loss_of(make, VECTOR)), "main_adjoint", X)
    np.testing.assert_allclose(gradient.numpy(), np.exp(X) + 2 * X, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_parameters(dtype):
    """TVM's Gradient refuses bfloat16 parameters."""
    half = relax.TensorType([4, 4], dtype)

    def make(bb, x, w):
        return relax.op.matmul(x, w, out_dtype="float32")

    mod = differentiate(loss_of(make, half, half), require_grads="a1")
    gradient_type = mod["main_adjoint"].ret_ty.fields[1].fields[0]
    assert str(gradient_type.dtype) == dtype
    if dtype == "float16":
        x = np.arange(16, dtype=dtype).reshape(4, 4)
        _, (gradient,) = run(mod, "main_adjoint", x, x)
        np.testing.assert_allclose(gradient.numpy(), np.tile(x.sum(0)[:, None], 4), rtol=1e-3)


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


def test_gradient_of_tvm_does_not_truncate_either():
    """It emits what our rule of astype says: nothing goes back through the integer."""

    def make(bb, x):
        codes = bb.emit(relax.op.astype(x, "int8"))
        return relax.op.multiply(bb.emit(relax.op.astype(codes, "float32")), x)

    mod = relax.transform.Gradient("main")(loss_of(make, VECTOR))
    _, (gradient,) = run(mod, "main_adjoint", X)
    np.testing.assert_allclose(gradient.numpy(), np.trunc(X))


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


def test_takes_variables():
    mod = loss_of(lambda bb, x: relax.op.exp(x), VECTOR)
    by_var = differentiate(mod, require_grads=[mod["main"].params[0]])
    tvm.ir.assert_structural_equal(by_var, differentiate(mod, require_grads="a0"))


@pytest.mark.parametrize(
    ("ty", "words"), [(VECTOR, "R.Tensor((4,)"), (relax.TensorType([], "int32"), "int32")]
)
def test_a_loss_that_is_no_float_scalar_says_what_to_write(ty, words):
    (error,) = errors_of(one_function(lambda bb, x, _: relax.op.add(x, x), ty, VECTOR))
    assert error.code == "loss-not-scalar"
    assert words in error.message
    assert "R.mean" in error.help


def test_chooses_a_field_of_a_tuple():
    def make(bb, x):
        return relax.Tuple([bb.emit(relax.op.exp(x)), bb.emit(relax.op.sum(x))])

    mod = one_function(make, VECTOR)
    (outputs, (gradient,)) = run(differentiate(mod, target_index=1), "main_adjoint", X)
    assert len(outputs) == 2
    np.testing.assert_allclose(gradient.numpy(), np.ones(4))
    assert errors_of(mod)[0].code == "loss-not-scalar"
    assert "no field 2" in errors_of(mod, target_index=2)[0].message


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


@I.ir_module
class Cast:
    @R.function
    def main(x: R.Tensor(("n",), "float32")) -> R.Tensor((), "float32"):
        m = T.int64()
        with R.dataflow():
            y = R.match_cast(x, R.Tensor((m,), "float32"))
            z = R.sum(R.multiply(y, y))
            R.output(z)
        return z


def test_match_cast_passes_the_gradient_on():
    _, (gradient,) = run(differentiate(Cast), "main_adjoint", X)
    np.testing.assert_allclose(gradient.numpy(), 2 * X)


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
