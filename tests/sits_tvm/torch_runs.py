"""Modules of PyTorch imported, run on llvm, and compared with PyTorch."""

import numpy as np
import pytest
import tvm
from tvm import relax

from sits_tvm.frontends.torch import from_torch

torch = pytest.importorskip("torch")

Dim = torch.export.Dim


class Calls(torch.nn.Module):
    """A module that calls `function` with its inputs and then with its buffers."""

    def __init__(self, function, *buffers):
        super().__init__()
        self.function, self.count = function, len(buffers)
        for i, buffer in enumerate(buffers):
            self.register_buffer(f"b{i}", buffer)

    def forward(self, *args):
        return self.function(*args, *[getattr(self, f"b{i}") for i in range(self.count)])


def runner(mod, params):
    """The module on llvm, as a function of torch tensors."""
    main = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"]

    def call(*inputs):
        out = main(*[tvm.runtime.tensor(x.numpy()) for x in inputs], *params.values())
        return out.numpy() if isinstance(out, tvm.runtime.Tensor) else [o.numpy() for o in out]

    return call


def run(mod, params, *inputs):
    return runner(mod, params)(*inputs)


def agrees(module, example, *runs, dynamic_shapes=None, tolerance=1e-5):
    """Import with `example`, then compare with torch on `runs`, or on `example`."""
    module = module.eval()
    mod, params = from_torch(module, example, dynamic_shapes=dynamic_shapes)
    call = runner(mod, params)
    for inputs in runs or [example]:
        got, want = call(*inputs), module(*inputs).detach().numpy()
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return mod, params


def check_all(functions, *inputs):
    names = list(functions)
    module = Calls(lambda *args: tuple(functions[name](*args) for name in names))
    mod, params = from_torch(module, inputs)
    for name, got, want in zip(names, run(mod, params, *inputs), module(*inputs), strict=True):
        assert got.dtype == want.numpy().dtype, name
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)
