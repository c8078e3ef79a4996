"""from_torch: one convention of arguments, parameters and results."""

from collections import OrderedDict

import numpy as np
import pytest
import tvm
import tvm_ffi
from torch_runs import Calls, Dim, agrees, run
from tvm import relax

from sits_tvm import SitsError
from sits_tvm.frontends.torch import from_torch

torch = pytest.importorskip("torch")


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.inner = torch.nn.Linear(8, 8)
        self.unused = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("small", torch.ones(8))
        self.register_buffer("large", torch.ones(17000))
        self.register_buffer("cache", torch.ones(17000), persistent=False)

    def forward(self, ids):
        x = self.inner(self.embed(ids)) * self.small + self.large.sum() + self.cache.sum()
        return self.head(x)


def test_inputs_come_first_and_tied_weights_once():
    module = Tied()
    mod, params = agrees(module, (torch.arange(5),), tolerance=1e-3)
    main = mod["main"]
    assert int(main.attrs["num_input"]) == 1
    assert [v.name for v in main.params] == ["ids", *params]
    assert list(params) == ["embed.weight", "inner.weight", "inner.bias", "large"]
    assert isinstance(main.ret_ty, relax.TensorType)


def test_shares_memory_with_torch():
    module = torch.nn.Linear(64, 64)
    _, params = from_torch(module, (torch.ones(1, 64),))
    assert torch.from_dlpack(params["weight"]).data_ptr() == module.weight.data_ptr()


def test_copies_what_cannot_be_shared():
    """A transposed weight and one that is not aligned to 64 bytes."""
    module = torch.nn.Linear(8, 4)
    module.weight = torch.nn.Parameter(torch.randn(8, 4).t())
    module.bias = torch.nn.Parameter(torch.randn(5)[1:])
    agrees(module, (torch.randn(2, 8),))


def test_prints_parses_and_saves_dotted_names():
    module = torch.nn.Sequential(OrderedDict(fc=torch.nn.Linear(4, 3), head=torch.nn.Linear(3, 2)))
    mod, _ = from_torch(module, (torch.randn(5, 4),))
    loaded = tvm.ir.load_json(tvm.ir.save_json(mod))
    assert tvm_ffi.structural_equal(loaded, mod)
    assert loaded["main"].params[1].name == "fc.weight"
    assert tvm_ffi.structural_equal(tvm.script.from_source(mod.script()), mod)


def test_takes_keyword_inputs_and_flattens_outputs():
    class Many(torch.nn.Module):
        def forward(self, pair, *, scale, flag=True, nothing=None):
            return {"sum": (pair["a"] + pair["b"]) * scale, "none": None, "list": [pair["a"]]}

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    mod, params = from_torch(Many(), {"pair": {"a": a, "b": b}, "scale": a, "flag": True})
    total, first = run(mod, params, a, b, a)
    np.testing.assert_allclose(total, (a + b) * a, rtol=1e-6)
    np.testing.assert_array_equal(first, a)


def test_exported_program_needs_nothing_else():
    program = torch.export.export(torch.nn.Linear(4, 2), (torch.randn(3, 4),), strict=False)
    assert list(from_torch(program)[1]) == ["weight", "bias"]
    with pytest.raises(SitsError, match="already holds"):
        from_torch(program, (torch.randn(3, 4),))


def test_bounds_are_attributes():
    shapes = ({0: Dim("n", min=3, max=9)},)
    mod, _ = from_torch(Calls(lambda x: x + 1), (torch.randn(4, 2),), dynamic_shapes=(shapes,))
    (n,) = mod["main"].attrs["tir_var_lower_bound"].items()
    assert int(n[1]) == 3
    assert int(mod["main"].attrs["tir_var_upper_bound"][n[0]]) == 9
