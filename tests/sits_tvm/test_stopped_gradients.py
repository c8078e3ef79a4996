"""detach and no_grad in a PyTorch module: its gradients, and its deployment."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from sits_tvm import Config, QuantSpec, build, differentiate, from_torch
from sits_tvm.diagnostics import collect

torch = pytest.importorskip("torch")


def estimator(weight, x):
    """The straight-through estimator as it is usually written: its gradient is 1 everywhere."""
    quantized = torch.clamp(torch.round(weight / 0.125), -8, 7) * 0.125
    return x @ (weight + (quantized - weight).detach())


def detached_branch(weight, x):
    y = x @ weight
    return y * y.detach()


def detached_in_place(weight, x):
    y = x @ weight
    return y * y.clone().detach_()


def no_grad_region(weight, x):
    y = x @ weight
    with torch.no_grad():
        z, rows = torch.relu(y) * 2, y.argmax(-1)
    return y * z + rows[:, None]


def no_grad_on_the_weight(weight, x):
    with torch.no_grad():
        norm = weight.norm()
    return x @ (weight / norm)


def nested_regions(weight, x):
    y = x @ weight
    with torch.no_grad():
        z = y * 2
        with torch.enable_grad():
            u = y * y
    return z * u


def region_that_writes(weight, x):
    y = x @ weight
    with torch.no_grad():
        z = y * 2
        z.clamp_(-1, 1)
    return y * z


@torch.no_grad()
def _cos(y):
    return y.cos()


def decorated_function(weight, x):
    y = x @ weight
    return y * _cos(y)


FUNCTIONS = [
    estimator, detached_branch, detached_in_place, no_grad_region, no_grad_on_the_weight,
    nested_regions, region_that_writes, decorated_function,
]  # fmt: skip


class Loss(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.linspace(-1.3, 1.4, 12).reshape(4, 3))

    def forward(self, x):
        y = self.function(self.weight, x)
        return (y * y).sum()


X = torch.linspace(-1, 1, 8).reshape(2, 4).cos() + 0.1


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_gradients_are_those_of_torch(function):
    model = Loss(function)
    with collect() as notes:
        mod, params = from_torch(model, (X,))
        mod = differentiate(mod, require_grads="weight")
    assert not notes
    vm = relax.VirtualMachine(build(mod, "llvm"), tvm.cpu())
    args = [tvm.runtime.tensor(X.numpy()), *params.values()]
    loss, (gradient,) = vm["main_adjoint"](*args)
    want = model(X)
    want.backward()
    np.testing.assert_allclose(loss.numpy(), want.item(), rtol=1e-5)
    np.testing.assert_allclose(vm["main"](*args).numpy(), want.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient.numpy(), model.weight.grad.numpy(), rtol=2e-5, atol=1e-6)


def test_an_exported_program_keeps_its_graph():
    program = torch.export.export(Loss(no_grad_region), (X,))
    before = str(program.graph)
    mod, _ = from_torch(program)
    assert "grad.no_grad" in str(mod)
    assert str(program.graph) == before


def test_a_detached_weight_is_quantized():
    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 64))

        def forward(self, x):
            return x @ self.weight.detach().T

    mod, params = from_torch(Linear(), (torch.ones(2, 64),))
    executable = build(mod, "llvm", params=params, config=Config(quant=QuantSpec(group_size=32)))
    assert len(executable.report.quantized) == 1
