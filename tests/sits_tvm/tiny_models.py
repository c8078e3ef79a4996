"""Random models of transformers, small enough to import in a second, and their attention calls."""

from functools import cache

import numpy as np
import pytest
import tvm
from tvm import relax

from sits_tvm.diagnostics import collect
from sits_tvm.frontends.pretrained import from_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
DECODERS = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {},
    "Qwen3": {},
    "Phi3": {},
    "Gemma2": {
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 7,
        **MIXED,
    },
    "Gemma3Text": {"sliding_window": 5, **MIXED},
    "GPT2": GPT2,
}


def tiny(name, cls="AutoModelForCausalLM", attention="eager", **options):
    torch.manual_seed(0)
    defaults = {} if name in ("GPT2", "Bloom", "Bert", "T5") else SIZES
    config = getattr(transformers, f"{name}Config")(**{**defaults, **options})
    model = getattr(transformers, cls).from_config(config).eval()
    model.set_attn_implementation(attention)
    return model


@cache
def imported(name):
    """The model, what it was imported as, and the notes; shared by the tests that only look."""
    model = tiny(name, **DECODERS[name])
    with collect() as notes:
        mod, params = from_pretrained(model)
    return model, mod, params, notes


def sites(mod):
    found = []

    def visit(expr):
        if isinstance(expr, relax.Call) and expr.op == tvm.ir.Op.get("relax.sits.attention"):
            found.append(expr.attrs)

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


def tokens(batch, length, seed=0):
    return torch.from_numpy(
        np.random.default_rng([seed, batch, length]).integers(97, size=(batch, length))
    )
