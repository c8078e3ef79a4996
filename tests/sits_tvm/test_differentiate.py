"""differentiate: what it accepts and what it adds."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from small_losses import VECTOR, X, errors_of, loss_of, run
from small_modules import one_function
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from sits_tvm import differentiate


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


def test_gradient_of_tvm_does_not_truncate_either():
    """It emits what our rule of astype says: nothing goes back through the integer."""

    def make(bb, x):
        codes = bb.emit(relax.op.astype(x, "int8"))
        return relax.op.multiply(bb.emit(relax.op.astype(codes, "float32")), x)

    mod = relax.transform.Gradient("main")(loss_of(make, VECTOR))
    _, (gradient,) = run(mod, "main_adjoint", X)
    np.testing.assert_allclose(gradient.numpy(), np.trunc(X))


def test_takes_variables():
    mod = loss_of(lambda bb, x: relax.op.exp(x), VECTOR)
    by_var = differentiate(mod, require_grads=[mod["main"].params[0]])
    tvm.ir.assert_structural_equal(by_var, differentiate(mod, require_grads="a0"))


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
