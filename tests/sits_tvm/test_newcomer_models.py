"""Models as a newcomer has them, from file or class to an executable with INT4 weights."""

import json

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import sits_tvm
from sits_tvm import Config, QuantSpec, from_torch
from sits_tvm.__main__ import main

torch = pytest.importorskip("torch")

INT4 = Config(quant=QuantSpec(group_size=32))


class BasicBlock(torch.nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(out)
        self.conv2 = torch.nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(out)
        self.down = torch.nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.down(x))


class ResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = torch.nn.Sequential(BasicBlock(16, 16, 1), BasicBlock(16, 32, 2))
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def test_resnet_has_its_head_in_int4_and_says_why_not_the_rest():
    torch.manual_seed(0)
    model, x = ResNet().eval(), torch.randn(2, 3, 12, 12)
    mod, params = from_torch(model, (x,))
    ex = sits_tvm.build(mod, "llvm", params=params, config=INT4)
    assert [row.name for row in ex.report.quantized] == ["head.weight"]
    convolutions = {n for n, p in model.named_parameters() if p.ndim == 4}
    assert {row.name for row in ex.report.skipped} == convolutions
    assert {row.reason.split(":")[0] for row in ex.report.skipped} == {"convolution"}
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](x.numpy(), *ex.param_list).numpy()
    want = model(x).detach().numpy()
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_a_convolution_alone_is_an_error_with_the_reason():
    mod, params = from_torch(torch.nn.Conv2d(3, 16, 3), (torch.randn(1, 3, 8, 8),))
    with pytest.raises(sits_tvm.SitsError, match="convolution: only weights of matrix products"):
        sits_tvm.build(mod, "llvm", params=params, config=INT4)


class Mlp(nn.Module):
    def __init__(self):
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: nn.Tensor):
        return self.down(nn.op.silu(self.up(x)))


def test_a_module_of_relax_frontend_nn_through_the_shell(tmp_path, capsys, rng):
    """`export_tvm` gives no values: weights are packed when it runs."""
    mod, named = Mlp().export_tvm({"forward": {"x": nn.spec.Tensor(["s", 64], "float32")}})
    path = tmp_path / "mlp.json"
    path.write_text(tvm.ir.save_json(mod))
    assert main(["build", str(path), "--int4", "--json", "--quiet", "-o", str(tmp_path / "o")]) == 0
    rows = json.loads(capsys.readouterr().out)["quantized"]
    assert [row["name"] for row in rows] == ["up.weight", "down.weight"]
    values = [rng.standard_normal(p.shape).astype("float32") for _, p in named]
    vm = relax.VirtualMachine(sits_tvm.load(tmp_path / "o"), tvm.cpu())
    packed = vm["forward_transform_params"]([tvm.runtime.tensor(v) for v in values])
    x = rng.standard_normal((3, 64)).astype("float32")
    got = vm["forward"](tvm.runtime.tensor(x), *packed).numpy()
    up, bias, down = (v.astype("float64") for v in values)
    hidden = x @ up.T + bias
    want = (hidden / (1 + np.exp(-hidden))) @ down.T
    assert np.abs(got - want).max() < 0.2 * np.abs(want).max()


def test_a_pass_of_the_users_own():
    """Before `build`, and inside of TVM's own driver, as README has it."""

    @tvm.transform.module_pass(opt_level=0, name="ReluToSilu")
    def mine(mod, _ctx):
        x = relax.dpl.wildcard()
        pattern = relax.dpl.is_op("relax.nn.relu")(x)

        def rewriting(_, found):
            return relax.op.nn.silu(found[x])

        out = mod.clone()
        out["main"] = relax.dpl.rewrite_call(pattern, rewriting, out["main"])
        return out

    layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    x = torch.randn(2, 64)
    mod, params = from_torch(layers.eval(), (x,))
    ex = sits_tvm.build(mine(mod), "llvm", params=params, config=INT4)
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](x.numpy(), *ex.param_list).numpy()
    want = layers[2](torch.nn.functional.silu(layers[0](x))).detach().numpy()
    assert np.abs(got - want).max() < 0.2 * np.abs(want).max()

    pipeline = tvm.transform.Sequential([mine, relax.get_pipeline("sits", config=Config())])
    target = sits_tvm.parse_target("llvm")
    compiled = relax.VirtualMachine(tvm.compile(mod, target, relax_pipeline=pipeline), tvm.cpu())
    got = compiled["main"](tvm.runtime.tensor(x.numpy()), *params.values()).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
