"""Second and third derivatives of R.sits.fake_quantize against a twin in torch float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from quantize_reference import Grid, away_from_ties
from quantize_runs import TARGET, module, run, variables
from tvm import relax

from relax_passes.op import fake_quantize
from relax_passes.op._fake_quantize_gradient import fake_quantize_grad, fake_quantize_tangent
from sits_tvm import build


def twin(x, scale, zero_point, lo, hi, index):
    """The straight-through surrogate in torch: rounding has gradient 1."""

    def rounded(v):
        return v + (v.round() - v).detach()

    z = zero_point + (zero_point.round().clamp(lo, hi) - zero_point).detach()
    s, z = scale.flatten()[index], z.flatten()[index]
    return (torch.clamp(rounded(x / s) + z, lo, hi) - z) * s


def surrogate(rng, with_zero_point):
    """gy and an upstream t of the shape of x; tangents of x, scale[, zero point]; and these."""
    scale = rng.uniform(0.1, 1, (4, 3)).astype("float32")
    zero_point = (rng.uniform(-3, 3, (4, 3)) * with_zero_point).astype("float32")
    x = away_from_ties(rng, (4, 10), scale, zero_point, Grid(group_size=4))
    inputs = [x, scale, zero_point][: 2 + with_zero_point]
    tangents = [rng.standard_normal(v.shape, "float32") for v in inputs]
    return rng.standard_normal((2, 4, 10), "float32"), tangents, inputs


def torch_products(upstreams, tangents, inputs):
    """<grad(gy), tangents> and <t, tangent of y> of the twin, with the tensors they depend on."""
    gy, t = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in upstreams)
    tangents, inputs = (
        [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]
        for values in (tangents, inputs)
    )
    rows = np.arange(40)
    index = torch.tensor((rows // 10 * 3 + rows % 10 // 4).reshape(4, 10))
    zero_point = inputs[2] if len(inputs) == 3 else torch.zeros(4, 3, dtype=torch.float64)
    y = twin(inputs[0], inputs[1], zero_point, -8, 7, index)
    first = torch.autograd.grad(y, inputs, gy, create_graph=True)
    product = sum((a * b).sum() for a, b in zip(first, tangents, strict=True))
    change = torch.autograd.grad(product, gy, create_graph=True)[0]
    return product, (change * t).sum(), [gy, *tangents, *inputs]


def assert_partials(function, arrays, loss, wrt):
    """Our partials of function(*arrays) for its last arguments against torch's of `loss`."""
    expected = torch.autograd.grad(loss, wrt, retain_graph=True, allow_unused=True)
    args = variables(*arrays)
    mod = relax.transform.Gradient("main", args[-len(wrt) :])(module(function, args))
    got = run(build(mod, TARGET), *arrays, function="main_adjoint")[1]
    for ours, right in zip(got, expected, strict=True):
        right = np.zeros(ours.shape) if right is None else right.numpy()
        np.testing.assert_allclose(ours, right, rtol=2e-6, atol=1e-12 + 2e-6 * abs(right).max())


@pytest.mark.parametrize("with_zero_point", [False, True])
def test_second_and_third_order_equal_the_twin(with_zero_point, rng):
    (gy, t), tangents, inputs = surrogate(rng, with_zero_point)
    count = len(inputs)
    attrs = dict(fake_quantize(*variables(*inputs), group_size=4).attrs.items())

    def second(gy, *rest):
        grads = relax.BlockBuilder.current().emit(fake_quantize_grad(gy, *rest[count:], **attrs))
        products = [relax.op.multiply(relax.TupleGetItem(grads, i), rest[i]) for i in range(count)]
        return functools.reduce(relax.op.add, map(relax.op.sum, products))

    def third(t, *rest):
        return relax.op.sum(relax.op.multiply(t, fake_quantize_tangent(*rest, **attrs)))

    product, change, (torch_gy, *others) = torch_products((gy, t), tangents, inputs)
    assert_partials(second, [gy, *tangents, *inputs], product, [torch_gy, *others])
    assert_partials(third, [t, *tangents, *inputs], change, others)
