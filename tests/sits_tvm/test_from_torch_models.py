"""from_torch: whole models of transformers have the numbers of torch."""

import pytest
import tvm
from torch_runs import Dim, agrees
from tvm import relax

from sits_tvm.frontends.torch import from_torch
from tests.trained_models import minilm_folder

torch = pytest.importorskip("torch")

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
@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", pytest.param("qwen2", marks=pytest.mark.slow), "qwen3", "gemma3", "gpt2"],
)
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
    model = tf.AutoModel.from_pretrained(
        minilm_folder(), attn_implementation=attention, local_files_only=True
    )
    batch, length = Dim("b", min=1, max=8), Dim("s", min=2, max=512)
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    agrees(
        Encoder(model),
        (tokens(2, 12, 20000), padded(2, 12)),
        (tokens(3, 19, 20000), padded(3, 19)),
        dynamic_shapes=shapes,
    )
