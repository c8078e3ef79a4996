"""Parameter gradients of imported transformers, float and with INT4 weights, against torch."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.op import fake_quantize
from sits_tvm import build, differentiate, from_torch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
F = torch.nn.functional

VOCABULARY, GROUP = 97, 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = {
    **SIZES,
    **{"num_key_value_heads": 2, "head_dim": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "Llama": DECODER,
    "Qwen3": DECODER,
    "Gemma3Text": {**DECODER, **WINDOWED},
    "GPT2": {**GPT2, "bos_token_id": 1, "eos_token_id": 2},
    "Bert": SIZES,
}
SMALL = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "n_layer": 1}


class Loss(torch.nn.Module):
    """Cross entropy of a language model's logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        mask = torch.ones_like(ids)
        logits = self.model(ids, attention_mask=mask).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tiny(name, attention, **changes):
    torch.manual_seed(0)
    options = {**MODELS[name], **{k: v for k, v in changes.items() if k in MODELS[name]}}
    config = getattr(transformers, f"{name}Config")(**options)
    config.use_cache = False
    auto = (
        transformers.AutoModelForMaskedLM if name == "Bert" else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(config).eval()
    model.set_attn_implementation(attention)
    return Loss(model)


def batch(rows, length):
    generator = torch.Generator().manual_seed(rows)
    return [torch.randint(VOCABULARY, (rows, length), generator=generator) for _ in range(2)]


def compiled_gradients(mod, params, inputs):
    """The loss, and the gradient of each parameter by name."""
    only = {gv: f for gv, f in mod.functions.items() if gv.name_hint == "main_adjoint"}
    ex = build(tvm.IRModule(only), "llvm", params=params)
    vm = relax.VirtualMachine(ex, tvm.cpu())
    arrays = [tvm.runtime.tensor(x.numpy()) for x in inputs]
    loss, gradients = vm["main_adjoint"](*arrays, *ex.params_for("main_adjoint"))
    names = [p.name for p in mod["main_adjoint"].params[len(inputs) :]]
    floats = [name for name in names if str(params[name].dtype).startswith("float")]
    pairs = zip(floats, gradients, strict=True)
    return loss.numpy(), {name: gradient.numpy() for name, gradient in pairs}


def assert_gradients_equal(ours, theirs):
    """1e-5 relative, per tensor. A bias of keys shifts all scores of a row, which softmax does not
    see: its gradient is zero but for rounding, as torch's is."""
    assert len(theirs) > 5
    for name, gradient in theirs.items():
        bound = 1e-5 * np.linalg.norm(gradient)
        if name.endswith("key.bias"):
            bound = 1e-5 * np.linalg.norm(theirs[name.replace("key", "query")])
        assert np.linalg.norm(ours[name] - gradient) <= bound, name


def gradients_of(module):
    named = module.named_parameters()
    return {name: p.grad.numpy() for name, p in named if p.grad is not None}


ALL = [(name, attention) for name in MODELS for attention in ("eager", "sdpa")]


def check(loss, dynamic_shapes=None):
    mod, params = from_torch(loss, tuple(batch(2, 8)), dynamic_shapes=dynamic_shapes)
    inputs = batch(2, 8) if dynamic_shapes is None else batch(3, 11)
    value, ours = compiled_gradients(differentiate(mod), params, inputs)
    expected = loss(*inputs)
    expected.backward()
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-6)
    assert_gradients_equal(ours, gradients_of(loss))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), ALL)
def test_parameter_gradients_agree_with_torch(name, attention):
    check(tiny(name, attention))


@pytest.mark.slow
def test_one_layer_agrees_with_torch():
    """GPT-2 uses its embedding a second time as its head: one parameter, the sum of both."""
    check(tiny("GPT2", "sdpa", **SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_symbolic_batch_and_sequence(name):
    dims = {0: torch.export.Dim("b", min=1, max=64), 1: torch.export.Dim("s", min=1, max=64)}
    check(tiny(name, "sdpa", **SMALL), {"ids": dims, "labels": dims})


class RoundThrough(torch.autograd.Function):
    """Rounding that passes the gradient on: the straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class FakeQuantized(torch.nn.Module):
    """Symmetric INT4 with a learned scale per group of `GROUP` input channels.

    A Linear stores (n, k), a Conv1D (k, n); the scale is (n, k / GROUP, 1).
    """

    def __init__(self, weight, turned):
        super().__init__()
        self.turned = turned
        groups = self.turn(weight.detach()).unflatten(-1, (-1, GROUP))
        self.scale = torch.nn.Parameter(groups.abs().amax(-1, keepdim=True) / 7.4)

    def turn(self, matrix):
        return matrix.T if self.turned else matrix

    def forward(self, weight):
        codes = RoundThrough.apply(self.turn(weight).unflatten(-1, (-1, GROUP)) / self.scale)
        return self.turn((codes.clamp(-8, 7) * self.scale).flatten(-2))

    def as_stored(self, scale):
        """As the op takes it, in NumPy."""
        return np.ascontiguousarray(self.turn(scale.squeeze(-1)).numpy())


# op: (which argument a weight is, its axis of input channels)
READERS = {"relax.permute_dims": (0, 1), "relax.matmul": (1, 0)}


@mutator
class QuantizeWeights(PyExprMutator):
    """Quantize the arguments of these names that a transpose (n, k) or a matmul (k, n) reads."""

    def __init__(self, names):
        super().__init__()
        self.scales = {name: None for name in names}

    def visit_call_(self, call):
        call = super().visit_call_(call)
        position, axis = READERS.get(call.op.name, (None, None))
        weight = None if position is None else call.args[position]
        if getattr(weight, "name", "") not in self.scales:
            return call
        shape = list(map(int, weight.ty.shape))
        shape[axis] //= GROUP
        scale = relax.Var(f"{weight.name}.scale", relax.TensorType(shape, "float32"))
        self.scales[weight.name] = scale
        made = fake_quantize(weight, scale, bits=4, axis=axis, group_size=GROUP)
        args = list(call.args)
        args[position] = self.builder_.emit(made)
        return relax.Call(call.op, args, call.attrs)


def quantized(mod, names):
    inserter = QuantizeWeights(names)
    main = inserter.visit_expr(mod["main"])
    scales = list(inserter.scales.values())
    func = relax.Function([*main.params, *scales], main.body, None, True, main.attrs)
    return tvm.IRModule({mod.get_global_var("main"): func})


def projections(loss, params):
    """(name, module) of the layers with a weight of their own."""
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    return [
        (name, module)
        for name, module in loss.named_modules()
        if isinstance(module, kinds) and f"{name}.weight" in params
    ]


def check_quantized(loss):
    mod, params = from_torch(loss, tuple(batch(2, 8)))
    layers = projections(loss, params)
    mod = quantized(mod, [f"{name}.weight" for name, _ in layers])
    weights = {f"{name}.weight": module.weight for name, module in layers}
    twins = {}
    for name, module in layers:
        twin = FakeQuantized(module.weight, not isinstance(module, torch.nn.Linear))
        torch.nn.utils.parametrize.register_parametrization(module, "weight", twin, unsafe=True)
        twins[f"{name}.weight.scale"] = twin
        params[f"{name}.weight.scale"] = tvm.runtime.tensor(twin.as_stored(twin.scale.detach()))
    value, ours = compiled_gradients(differentiate(mod), params, batch(2, 8))
    expected = loss(*batch(2, 8))
    expected.backward()
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-6)
    theirs = {n: g for n, g in gradients_of(loss).items() if "parametrizations" not in n}
    theirs |= {name: weight.grad.numpy() for name, weight in weights.items()}
    theirs |= {name: twin.as_stored(twin.scale.grad) for name, twin in twins.items()}
    assert_gradients_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), ALL)
def test_int4_weights_agree_with_the_torch_twin(name, attention):
    """Every gradient, in weights, scales and what stays in float."""
    check_quantized(tiny(name, attention))


def test_one_layer_with_int4_weights_agrees_with_the_torch_twin():
    check_quantized(tiny("Llama", "sdpa", **SMALL))
