"""Tiny transformers models and the number of attention blocks in each. Imports them inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
OPT = {
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
SPEECH = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0},
    **{"bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}
PICTURE = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "image_size": 16, "patch_size": 8},
}


@dataclass(frozen=True)
class Model:
    """A model class and config of transformers, what it is called with, and its blocks.

    `inputs` makes them for a length. `dynamic` names the axes that may be symbolic: for each input,
    {axis: name}.
    """

    name: str
    model: str
    config: str
    sizes: dict[str, Any]
    blocks: int
    inputs: Callable[[int], dict[str, torch.Tensor]]
    dynamic: dict[str, dict[int, str]] | None = None
    keywords: tuple[tuple[str, Any], ...] = ()
    implementations: tuple[str, ...] = ("eager", "sdpa")

    def build(self, implementation: str) -> torch.nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes)
        model = getattr(transformers, self.model)(config).eval()
        model.set_attn_implementation(implementation)
        return First(model, tuple(self.inputs(LENGTH)), dict(self.keywords))


class First(torch.nn.Module):
    """The first output of a model, by position."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...], keywords: dict) -> None:
        super().__init__()
        self.model, self.names, self.keywords = model, names, keywords

    def forward(self, *inputs):
        named = dict(zip(self.names, inputs, strict=True))
        return self.model(**named, **self.keywords, return_dict=False)[0]


def tokens(length: int) -> torch.Tensor:
    return torch.arange(2 * length).reshape(2, length) % 60 + 2


def text(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(length)}


def padded_text(length: int) -> dict[str, torch.Tensor]:
    """The second row has a third of padding tokens in front."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, : length // 3] = 0
    return {"input_ids": tokens(length), "attention_mask": mask}


def pair(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(length), "decoder_input_ids": tokens(length // 2 + 1)}


def picture(_length: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def speech(length: int) -> dict[str, torch.Tensor]:
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    return {"input_features": sound, "decoder_input_ids": tokens(length // 2 + 1)}


LENGTH, OTHER_LENGTH = 9, 21
"""Inputs are traced at the first; where the length is symbolic, the second is run, too."""

SEQUENCE = {"input_ids": {1: "s"}}
PADDED = {"input_ids": {1: "s"}, "attention_mask": {1: "s"}}
TWO_SEQUENCES = {"input_ids": {1: "s"}, "decoder_input_ids": {1: "t"}}
SPOKEN = {"decoder_input_ids": {1: "t"}}
CACHELESS = (("use_cache", False),)


def decoder(name: str, stem: str, sizes: dict[str, Any], **more: Any) -> Model:
    sizes = {**sizes, **more}
    parts = f"{stem}ForCausalLM", f"{stem}Config"
    return Model(name, *parts, sizes, 2, text, SEQUENCE, CACHELESS)


MODELS = [
    decoder("Llama", "Llama", GROUPED),
    decoder("Mistral, window", "Mistral", GROUPED, sliding_window=4),
    decoder("Qwen2", "Qwen2", GROUPED),
    decoder("Qwen3", "Qwen3", GROUPED, head_dim=8),
    Model(
        *("Gemma 2, softcap", "Gemma2ForCausalLM", "Gemma2Config"),
        *({**GROUPED, "head_dim": 8, "sliding_window": 4}, 2, text, SEQUENCE, CACHELESS),
        implementations=("eager",),
    ),
    Model(
        *("Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig"),
        *({**GROUPED, "head_dim": 8, "sliding_window": 4}, 2, text, SEQUENCE, CACHELESS),
    ),
    decoder("GPT-NeoX", "GPTNeoX", SIZES),
    decoder("OPT", "OPT", OPT),
    decoder("Phi-3", "Phi3", GROUPED),
    Model("GPT-2", "GPT2LMHeadModel", "GPT2Config", GPT2, 2, text, SEQUENCE, CACHELESS),
    Model(
        "Llama, padded",
        "LlamaForCausalLM",
        "LlamaConfig",
        GROUPED,
        2,
        padded_text,
        PADDED,
        CACHELESS,
    ),
    Model("BERT", "BertModel", "BertConfig", SIZES, 2, padded_text, PADDED),
    Model("RoBERTa", "RobertaModel", "RobertaConfig", SIZES, 2, padded_text, PADDED),
    Model("T5", "T5Model", "T5Config", T5, 6, pair, TWO_SEQUENCES, CACHELESS),
    Model("BART", "BartModel", "BartConfig", SPEECH, 6, pair, TWO_SEQUENCES, CACHELESS),
    Model("ViT", "ViTModel", "ViTConfig", PICTURE, 2, picture),
    Model("CLIP text", "CLIPTextModel", "CLIPTextConfig", SIZES, 2, text, SEQUENCE),
    Model("CLIP vision", "CLIPVisionModel", "CLIPVisionConfig", PICTURE, 2, picture),
    Model(
        "Whisper",
        "WhisperModel",
        "WhisperConfig",
        {**SPEECH, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
        6,
        speech,
        SPOKEN,
        CACHELESS,
    ),
]
