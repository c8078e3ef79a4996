"""INT4 weights against float weights: Hessian-vector products, gap and first-order term."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tvm.script import ir as I
from tvm.script import relax as R

from sits_tvm import check_gradient_conservation, differentiate
from sits_tvm.gradient_check._torch_values import to_torch
from sits_tvm.gradient_check.fidelity import hessian_vector_product, without_fake_quantize
from sits_tvm.gradient_check.twin import Twin
from sits_tvm.pipeline import run_on_host


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
