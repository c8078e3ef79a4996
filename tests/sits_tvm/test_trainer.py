"""TVM's Trainer, SetupTrainer and optimizers, with our ops and with every NumPy that we support."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import PrimType
from tvm.relax.training import SetupTrainer, Trainer
from tvm.relax.training.loss import MSELoss
from tvm.relax.training.optimizer import SGD, Adam, MomentumSGD
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from sits_tvm import QuantSpec, convert_qat, prepare_qat
from sits_tvm.training import _numpy_compat

ROWS = 16
OPTIMIZERS = {
    "SGD": SGD(0.05),
    "MomentumSGD": MomentumSGD(0.005, 0.9, 0.1, 1e-4, True),
    "Adam": Adam(0.002),
}


@I.ir_module
class Backbone:
    I.module_attrs({"param_num": 3, "state_num": 0})

    @R.function
    def backbone(
        x: R.Tensor((16, 64), "float32"),
        up: R.Tensor((32, 64), "float32"),
        bias: R.Tensor((32,), "float32"),
        down: R.Tensor((32, 8), "float32"),
    ):
        with R.dataflow():
            h = R.matmul(x, R.permute_dims(up))
            h1 = R.add(h, bias)
            h2 = R.nn.relu(h1)
            y = R.matmul(h2, down)
            R.output(y)
        return y


def set_up(mod, optimizer):
    ty = relax.TensorType((ROWS, 8), "float32")
    mod = SetupTrainer(MSELoss(reduction="mean"), optimizer, [ty, ty])(mod)
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    return Trainer(mod, vm, tvm.cpu(), False)


def values(rng):
    shapes = {"up": (32, 64), "bias": (32,), "down": (32, 8)}
    return {
        n: (rng.standard_normal(s) / np.sqrt(s[-1])).astype("float32") for n, s in shapes.items()
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_trains_through_fake_quantize_and_deploys(rng, optimizer):
    """prepare_qat, SetupTrainer, Trainer, convert_qat, build: the deployed model has learned."""
    spec = QuantSpec(bits=3, group_size=32)
    params, teacher = values(rng), values(rng)
    mod, start = prepare_qat(Backbone, spec, params=params, func="backbone")
    assert int(mod.attrs["param_num"]) == 5
    trainer = set_up(mod, optimizer)
    trainer.load_params({name: tvm.runtime.tensor(value) for name, value in start.items()})
    x = rng.standard_normal((ROWS, 64)).astype("float32")
    y = np.maximum(x @ teacher["up"].T + teacher["bias"], 0) @ teacher["down"]
    losses = [float(trainer.update([x], [y]).numpy()) for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]
    trained = trainer.export_params()
    assert (trained["up.scale"].numpy() != start["up.scale"].numpy()).mean() > 0.9
    deployed, packed = convert_qat(mod, trained, spec, func="backbone")
    built = sits_tvm.build(deployed, "llvm -mcpu=native", params=packed)
    got = relax.VirtualMachine(built, tvm.cpu())["backbone"](x, *built.params_for("backbone"))
    want = trainer.predict(x).numpy()
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-6 * np.abs(want).max())
    assert [row.name for row in built.report.quantized] == ["up", "down"]


def test_adam_steps_are_those_of_torch(rng):
    """Three steps on the fake-quantized module, with the straight-through twin in torch."""
    torch = pytest.importorskip("torch")
    spec = QuantSpec(group_size=32, scale_dtype="float32")
    mod, start = prepare_qat(Backbone, spec, params=values(rng), func="backbone", scales="absmax")
    trainer = set_up(mod, Adam(0.01))
    trainer.load_params({n: v for n, v in start.items()})
    x = rng.standard_normal((ROWS, 64)).astype("float32")
    y = rng.standard_normal((ROWS, 8)).astype("float32")
    weights = {n: torch.tensor(np.asarray(v), requires_grad=True) for n, v in start.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    for _ in range(3):
        up, down = twin(torch, weights["up"]), twin(torch, weights["down"].T).T
        out = torch.relu(torch.tensor(x) @ up.T + weights["bias"]) @ down
        loss = torch.nn.functional.mse_loss(out, torch.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(trainer.update([x], [y]).numpy(), loss.item(), rtol=1e-5)
    for name, value in trainer.export_params().items():
        np.testing.assert_allclose(value.numpy(), weights[name].detach(), rtol=0, atol=1e-5)


def twin(torch, w):
    """Symmetric groups of 32 along the last axis at amax / 7; the scale is a constant."""
    groups = w.reshape(w.shape[0], -1, 32)
    scale = groups.detach().abs().amax(-1, keepdim=True) / 7
    ratio = groups / scale
    codes = (torch.round(ratio) - ratio).detach() + ratio
    return (torch.clamp(codes, -8, 7) * scale).reshape(w.shape)


def test_parameters_that_trainer_draws():
    """TVM's own method works up to NumPy 2.2; ours draws the same numbers, with any NumPy."""
    trainer = set_up(Backbone, SGD(0.1))
    np.random.seed(1)
    _numpy_compat._init_params(trainer)
    ours = [p.numpy() for p in trainer._params]
    assert 0.2 < np.abs(ours[0]).max() <= np.sqrt(6 / 96)
    for variable, value in zip(trainer._param_vars, ours, strict=True):
        assert value.shape == tuple(int(extent) for extent in variable.ty.shape)
        assert value.dtype == np.float32
    if _numpy_compat._numpy_takes_prim_types():
        np.random.seed(1)
        Trainer.xaiver_uniform_init_params(trainer)
        for mine, theirs in zip(ours, trainer._params, strict=True):
            np.testing.assert_array_equal(mine, theirs.numpy())
    else:
        assert Trainer.xaiver_uniform_init_params is _numpy_compat._init_params
        with pytest.raises((TypeError, ValueError), match="dtype"):
            np.ones((), PrimType("float32"))
