"""from_torch: fake quantization and quantize/dequantize pairs, against PyTorch itself."""

import numpy as np
import pytest
from torch_runs import Calls, run
from tvm import relax

import sits_tvm
from relax_passes import FixQuantizeGradient
from sits_tvm import SitsError, from_torch
from sits_tvm.diagnostics import collect

torch = pytest.importorskip("torch")
pytest.importorskip("torch.ao.quantization.fx._decomposed")  # registers quantized_decomposed

QDQ = torch.ops.quantized_decomposed
CHANNELS = 6
SCALES = torch.linspace(0.05, 0.4, CHANNELS)
ZEROS = torch.tensor([0, 3, -2, 1, 7, -8], dtype=torch.int32)


def per_tensor(x):
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 2, -8, 7)


def per_tensor_tensors(x, s, z):
    return torch.fake_quantize_per_tensor_affine(x, s, z, 0, 15)


def per_channel(x, s, z):
    return torch.fake_quantize_per_channel_affine(x, s, z, 1, -8, 7)


def learnable(x, s, z):
    return torch._fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7, 1.0)


def learnable_per_channel(x, s, z):
    return torch._fake_quantize_learnable_per_channel_affine(x, s, z, 1, -8, 7, 1.0)


def pair(x):
    form = (0.1, 3, -8, 7, torch.int8)
    return QDQ.dequantize_per_tensor(QDQ.quantize_per_tensor(x, *form), *form)


def seven_bits(x):
    form = (0.1, 3, 0, 127, torch.int8)
    return QDQ.dequantize_per_tensor(QDQ.quantize_per_tensor(x, *form), *form)


def pair_of_tensors(x, s, z):
    form = (s, z, -7, 7, torch.int8)
    return QDQ.dequantize_per_tensor.tensor(QDQ.quantize_per_tensor.tensor(x, *form), *form)


def pair_per_channel(x, s, z):
    form = (s, z, 1, -8, 7, torch.int8)
    return QDQ.dequantize_per_channel(QDQ.quantize_per_channel(x, *form), *form)


ONE, NO_ZERO = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32)
# name: module, (bits, axis or None)
MODULES = {
    "per tensor": (Calls(per_tensor), 4, None),
    "tensors": (Calls(per_tensor_tensors, ONE, NO_ZERO + 5), 4, None),
    "per channel": (Calls(per_channel, SCALES, ZEROS), 4, 1),
    "learnable": (Calls(learnable, ONE.reshape(1), torch.tensor([1.3])), 4, None),
    "learnable per channel": (Calls(learnable_per_channel, SCALES, ZEROS + 0.4), 4, 1),
    "pair": (Calls(pair), 4, None),
    "seven bits": (Calls(seven_bits), 7, None),
    "pair of tensors": (Calls(pair_of_tensors, ONE, NO_ZERO), 4, None),
    "pair per channel": (Calls(pair_per_channel, SCALES, ZEROS), 4, 1),
}


def away_from_ties(scales, shape=(64, CHANNELS)):
    rng = np.random.default_rng(0)
    codes = rng.integers(-24, 24, shape) + rng.uniform(-0.4, 0.4, shape)
    return torch.tensor(codes * scales, dtype=torch.float32)


@pytest.mark.parametrize("name", MODULES)
def test_same_values_and_one_op(name):
    module, bits, axis = MODULES[name]
    x = away_from_ties(np.asarray(SCALES) if axis else 0.1)
    mod, params = from_torch(module, (x,))
    want = module(x).numpy()
    np.testing.assert_array_equal(run(mod, params, x), want)
    fixed = FixQuantizeGradient()(mod)
    calls = [b.value for b in fixed["main"].body.blocks[0].bindings]
    (call,) = [c for c in calls if isinstance(c, relax.Call) and "sits" in c.op.name]
    assert call.op.name == "relax.sits.fake_quantize"
    assert (call.attrs["bits"], call.attrs["axis"]) == (bits, 1 if axis else -1)
    np.testing.assert_array_equal(run(fixed, params, x), want)


def ties(scale):
    return ((torch.arange(-10, 10) + 0.5) * scale).reshape(1, -1).float()


def test_a_power_of_two_agrees_on_ties():
    module = Calls(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.125, 3, -8, 7))
    with collect() as found:
        mod, params = from_torch(module, (ties(0.125),))
    assert [d.code for d in found] == []
    np.testing.assert_array_equal(run(mod, params, ties(0.125)), module(ties(0.125)).numpy())


def test_other_scales_follow_the_documented_quotient():
    """PyTorch computes x * (1 / scale); on ties of this scale that is another code. A note."""
    scale = 0.3
    module = Calls(lambda x: torch.fake_quantize_per_tensor_affine(x, scale, 0, -8, 7))
    x, s = ties(scale), torch.tensor(scale)
    with collect() as found:
        mod, params = from_torch(module, (x,))
    assert [(d.code, d.severity) for d in found] == [("torch-reciprocal", "note")]
    documented = torch.clamp(torch.round(x / s), -8, 7) * s
    computed = torch.clamp(torch.round(x * (1 / s)), -8, 7) * s
    np.testing.assert_array_equal(module(x).numpy(), computed.numpy())
    np.testing.assert_array_equal(run(mod, params, x), documented.numpy())
    assert (documented != computed).any()


def test_disabled_fake_quantization_passes():
    op = torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams

    def off(x, s, z):
        return op(x, s, z, torch.zeros(1, dtype=torch.int64), -8, 7)[0]

    x = away_from_ties(0.1)
    mod, params = from_torch(Calls(off, ONE, NO_ZERO), (x,))
    np.testing.assert_array_equal(run(mod, params, x), x.numpy())


def test_a_wide_bias_is_dequantized_in_plain_ops():
    q = torch.tensor([5, -70000, 12], dtype=torch.int32)
    scales, zeros = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([0, 1, 0])

    def bias(x, q, s, z):
        wide = QDQ.dequantize_per_channel(q, s, z, 0, -(2**31), 2**31 - 1, torch.int32)
        return x + wide

    module, x = Calls(bias, q, scales, zeros), torch.zeros(2, 3)
    mod, params = from_torch(module, (x,))
    np.testing.assert_array_equal(run(mod, params, x), module(x).numpy())


def test_a_range_that_is_no_width_is_an_error():
    module = Calls(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -5, 6))
    with pytest.raises(SitsError, match="-5 to 6 are not the range of 2 to 8 bits"):
        from_torch(module, (torch.ones(2),))


def test_the_gradient_factor_is_noted():
    def scaled(x, s, z):
        return torch._fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7, 0.01)

    with collect() as found:
        from_torch(Calls(scaled, ONE.reshape(1), torch.zeros(1)), (torch.ones(2, 3),))
    assert "gradient-factor" in [d.code for d in found]


class QuantizedActivations(torch.nn.Module):
    """Fakes of torch.ao with tensors of flags; `fused` ones update and quantize in one op."""

    def __init__(self, fused):
        super().__init__()
        ao = torch.ao.quantization
        made = ao.FusedMovingAvgObsFakeQuantize if fused else ao.FakeQuantize
        weights = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0, "dtype": torch.qint8}
        observer = ao.MovingAveragePerChannelMinMaxObserver
        self.weight = torch.nn.Parameter(torch.randn(16, 64))
        self.of_weight = made(observer, quant_min=-8, quant_max=7, **weights)
        self.of_input = made(ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.off = made(ao.MovingAverageMinMaxObserver)
        self.off.disable_fake_quant()

    def forward(self, x):
        return self.off(self.of_input(x) @ self.of_weight(self.weight).T)


@pytest.mark.parametrize("fused", [False, True])
def test_modules_of_torch_ao_do_what_their_flags_say(fused):
    """Their weights are packed, symmetric where all zero points are 0."""
    torch.manual_seed(0)
    model, x = QuantizedActivations(fused), torch.randn(3, 64)
    model(x)
    with pytest.raises(SitsError, match=r"observer-enabled[^$]*`of_weight`[^$]*`of_input`"):
        from_torch(model, (x,))
    model.apply(torch.ao.quantization.disable_observer)
    mod, params = from_torch(model.eval(), (x,))
    assert "forward" not in vars(model.of_weight)
    got, want = run(mod, params, x), model(x).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())
    (row,) = sits_tvm.build(mod, "llvm", params=params).report.quantized
    assert (row.name, row.spec.split(",")[0]) == ("weight", "int4 per channel symmetric")
