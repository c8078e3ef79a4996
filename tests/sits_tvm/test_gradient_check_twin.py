"""The float64 twin computes what the compiled function computes, op by op."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op as R
from tvm.tirx import FloatImm

from sits_tvm import SitsError
from sits_tvm.gradient_check._torch_values import to_torch
from sits_tvm.gradient_check.twin import RULES, Twin

SHAPES = {
    "m": ((4, 6), "float32"),
    "v": ((6,), "float32"),
    "x": ((2, 4, 9, 8), "float32"),
    "w": ((8, 2, 3, 3), "float32"),
    "i": ((2, 3), "int64"),
    "labels": ((4,), "int64"),
    "j": ((4, 6), "int64"),
}


def float_imm(value):
    return FloatImm("float32", value)


def calls(m, v, x, w, i, labels, j):
    """One call or more of every op that the twin knows, beside attention and our own ops."""
    positive = R.add(R.abs(m), relax.const(1.5))
    unit = R.tanh(m)
    flag = R.greater(m, v)
    for name in [
        "exp",
        "sin",
        "cos",
        "tan",
        "sinh",
        "cosh",
        "tanh",
        "atan",
        "asinh",
        "sigmoid",
        "erf",
        "negative",
        "square",
    ]:
        yield getattr(R, name)(m)
    for name in ["log", "rsqrt", "sqrt", "acosh"]:
        yield getattr(R, name)(positive)
    for name in ["asin", "acos", "atanh"]:
        yield getattr(R, name)(R.multiply(unit, relax.const(0.9)))
    for name in ["round", "floor", "ceil", "trunc", "sign", "abs"]:
        yield getattr(R, name)(R.multiply(m, relax.const(3.0)))
    for name in ["add", "subtract", "multiply", "divide", "maximum", "minimum"]:
        yield getattr(R, name)(m, v)
    for name in ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]:
        yield R.astype(getattr(R, name)(m, v), "float32")
    yield R.power(positive, relax.const(1.7))
    for name in ["sum", "mean", "max", "min", "prod", "variance"]:
        yield getattr(R, name)(m, [0], True)
        yield getattr(R, name)(m, [-1])
    yield R.sum(m)
    yield R.cumsum(m, 1)
    yield R.cumsum(m, 0, exclusive=True)
    yield R.logical_and(flag, R.logical_not(R.less(m, relax.const(0.5))))
    yield R.logical_or(flag, R.less(m, relax.const(0.5)))
    yield R.logical_xor(flag, R.less(m, relax.const(0.5)))
    yield R.clip(m, float_imm(-0.5), float_imm(0.7))
    yield R.astype(R.multiply(m, relax.const(5.0)), "int8")
    yield R.divide(labels, relax.const(2, "int64"))
    for name in ["relu", "silu", "gelu", "gelu_tanh", "leakyrelu"]:
        yield getattr(R.nn, name)(m)

    yield R.permute_dims(x, [0, 2, 1, 3])
    yield R.permute_dims(m)
    yield R.reshape(m, (2, 12))
    yield R.flatten(m)
    yield R.squeeze(R.expand_dims(m, [0, 2]), [0, 2])
    yield R.expand_dims(m, [-1])
    yield R.concat([m, m], -1)
    yield R.stack([m, m], 1)
    yield relax.TupleGetItem(R.split(m, 3, 1), 1)
    yield relax.TupleGetItem(R.split(m, [1, 4], 1), 1)
    yield R.strided_slice(m, [0, 1], [3, -5], [0, 2**31], [-1, 2])
    yield R.take(m, i, 0)
    yield R.take(m, i, -1)
    yield R.gather_elements(m, j, 1)
    yield R.where(flag, m, v)
    yield R.broadcast_to(v, (4, 6))
    yield R.collapse_sum_to(m, (6,))
    yield R.collapse_sum_like(m, v)
    for name in ["zeros", "ones"]:
        yield getattr(R, name)((2, 3), "float32")
        yield getattr(R, f"{name}_like")(m)
    yield R.full((2, 3), relax.const(2.5))
    yield R.full_like(m, relax.const(2.5))
    yield R.arange(1, 7, 2, "int64")
    yield R.one_hot(labels, float_imm(2.0), float_imm(-1.0), 5, 1)
    yield R.repeat(m, 2, 1)
    yield R.tile(m, (2, 1))
    yield R.flip(m, 1)
    yield R.triu(m, 1)
    yield R.tril(m, -1)

    yield R.matmul(m, v)
    yield R.matmul(x, R.permute_dims(x, [0, 1, 3, 2]))
    yield R.nn.softmax(m, 0)
    yield R.nn.log_softmax(m)
    yield R.nn.layer_norm(m, v, v, [-1])
    yield R.nn.rms_norm(m, v, [-1])
    yield R.nn.cross_entropy_with_logits(m, m)
    yield R.nn.nll_loss(R.nn.log_softmax(m), labels)
    yield R.nn.nll_loss(R.nn.log_softmax(m), labels, v, reduction="sum")
    yield R.nn.conv2d(x, w, strides=2, padding=(1, 0, 2, 1), groups=2)
    yield R.nn.max_pool2d(x, (3, 2), (2, 2), padding=(1, 0, 1, 1))
    yield R.nn.avg_pool2d(x, (3, 2), (2, 2), padding=(1, 0, 1, 0))
    yield R.nn.adaptive_avg_pool2d(x, 1)
    zero, scale = relax.const(3, "int8"), relax.const(0.05)
    codes = R.quantize(m, scale, zero)
    yield R.dequantize(codes, scale, zero)
    yield R.dequantize(R.quantize(m, v_scale(v), zero, 1), v_scale(v), zero, 1)


def v_scale(v):
    return R.add(R.abs(v), relax.const(0.01))


def zoo():
    """(module, names of the ops in it): every call of `calls` is an output."""
    params = [relax.Var(n, relax.TensorType(s, d)) for n, (s, d) in SHAPES.items()]
    mod = one_function(params, lambda _: relax.Tuple(list(calls(*params))))
    return mod, [binding.value for binding in mod["main"].body.blocks[0].bindings]


def one_function(params, make):
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(make(bb))
        bb.emit_func_output(out)
    return bb.get()


def draw(rng):
    args = [rng.standard_normal(s).astype(d) for s, d in list(SHAPES.values())[:4]]
    args[1] = np.abs(args[1]) + 0.1  # weights of a loss
    indices = [rng.integers(0, 4, s) for s, _ in list(SHAPES.values())[4:]]
    return [*args, *indices]


def test_every_op_has_the_value_of_the_compiled_one(rng):
    mod, values = zoo()
    args = draw(rng)
    compiled = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](*args)
    twin = Twin(mod, "main").run([to_torch(arg) for arg in args]).outputs
    assert len(twin) == len(compiled) > 100
    for got, want, call in zip(twin, compiled, calls(*mod["main"].params), strict=True):
        np.testing.assert_allclose(
            np.asarray(got), want.numpy(), rtol=2e-5, atol=2e-6, err_msg=str(call)
        )
    used = {v.op.name for v in values if isinstance(v, relax.Call)}
    untried = {name for name in RULES if not name.startswith("relax.sits.")} - used
    assert untried <= {"relax.grad.no_grad", "relax.log2", "relax.log1p"}


def test_lists_every_op_without_a_rule():
    x = relax.Var("x", relax.TensorType((3, 3), "float32"))
    mod = one_function(
        [x], lambda bb: R.einsum([x, bb.emit(R.nn.leakyrelu(R.nn.softplus(x)))], "ij,ij->i")
    )
    with pytest.raises(SitsError) as caught:
        Twin(mod, "main")
    assert [d.code for d in caught.value.diagnostics] == ["no-reference"] * 2
    assert "relax.nn.softplus" in str(caught.value)
    assert "relax.einsum" in str(caught.value)


def test_shapes_are_bound_by_the_arguments():
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 4), "float32"))
    mod = one_function([x], lambda _: R.reshape(x, (n * 2, 2)))
    run = Twin(mod, "main").run([torch.ones(3, 4, dtype=torch.float64)])
    assert run.outputs.shape == (6, 2)


def test_a_form_without_a_rule_is_named():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4, 4, 2), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            pool = bb.emit_output(R.nn.max_pool2d(x, (2, 2), layout="NHWC"), "pool")
        bb.emit_func_output(pool)
    twin = Twin(bb.get(), "main")
    with pytest.raises(SitsError, match=r"nn\.max_pool2d: layout NHWC") as caught:
        twin.run([torch.zeros(1, 4, 4, 2, dtype=torch.float64)])
    assert caught.value.diagnostics[0].binding == "pool"
