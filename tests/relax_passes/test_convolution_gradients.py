"""First and second order of convolutions, against PyTorch in float64."""

import numpy as np
import pytest
import torch
from tvm import relax
from tvm.relax import op as O

from sits_tvm import differentiate
from sits_tvm.gradient_check.fidelity import hessian_vector_product
from sits_tvm.pipeline import run_on_host

CASES = {
    "strides that skip a column": {"strides": 2, "padding": (1, 0, 1, 1)},
    "dilation": {"dilation": 2, "padding": 2, "strides": (2, 1)},
}


def model(options):
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3, 9, 8), "float32"))
    w = relax.Var("w", relax.TensorType((4, 3, 3, 2), "float32"))
    with bb.function("main", [x, w]):
        with bb.dataflow():
            y = bb.emit(O.tanh(bb.emit(O.nn.conv2d(x, w, **options))))
            loss = bb.emit_output(O.mean(O.multiply(y, y)))
        bb.emit_func_output(loss)
    return bb.get()


def reference(options, x, w, directions):
    pair = lambda v: (v, v) if isinstance(v, int) else v  # noqa: E731
    padding = options.get("padding", 0)
    top, left, bottom, right = padding if isinstance(padding, tuple) else (padding,) * 4
    how = {"stride": pair(options.get("strides", 1)), "dilation": pair(options.get("dilation", 1))}

    def loss(x, w):
        padded = torch.nn.functional.pad(x, (left, right, top, bottom))
        return torch.nn.functional.conv2d(padded, w, **how).tanh().square().mean()

    inputs = tuple(torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, w))
    vectors = tuple(torch.tensor(v, dtype=torch.float64) for v in directions)
    first = torch.autograd.grad(loss(*inputs), inputs)
    return first, torch.autograd.functional.hvp(loss, inputs, vectors)[1]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_both_orders_equal_torch(options, rng):
    args = [
        rng.standard_normal(s).astype("float32") for s in ((2, 3, 9, 8), (4, 3, 3, 2)) for _ in "ab"
    ]
    x, dx, w, dw = args
    run = run_on_host(hessian_vector_product(model(options), "main", ["x", "w"]))
    first, second = reference(options, x, w, (dx, dw))
    _, gradients = run("main_adjoint", [x, w])
    _, products = run("main_directional_adjoint", [x, w, dx, dw])
    for got, want in zip([*gradients, *products], [*first, *second], strict=True):
        assert np.linalg.norm(got - want.numpy()) < 1e-5 * np.linalg.norm(want.numpy())


def test_a_transpose_of_groups_is_refused():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4, 5, 5), "float32"))
    w = relax.Var("w", relax.TensorType((4, 2, 3, 3), "float32"))
    with bb.function("main", [x, w]):
        with bb.dataflow():
            y = bb.emit(O.nn.conv2d_transpose(x, w, groups=2))
            loss = bb.emit_output(O.sum(y))
        bb.emit_func_output(loss)
    with pytest.raises(ValueError, match="2 groups"):
        differentiate(bb.get())
