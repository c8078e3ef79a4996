"""The masks that transformers builds, as imported: all of them are proved, none is left over."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import IRModule, relax, tirx

import sits_tvm
from relax_passes.index_analysis.visibility import (
    Visibility,
    additive_visibility,
    every_row_sees_a_key,
    visibility,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "mistral": ("Mistral", _SIZES | {"sliding_window": 4}),
    "gemma3": (
        "Gemma3Text",
        _SIZES
        | {
            "num_hidden_layers": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 64},
    ),
}
_WINDOWS = {"llama": [None], "mistral": [-3], "gemma3": [-3, None], "gpt2": [None]}


def imported(name: str, kind: str, is_dynamic: bool, has_padding: bool) -> IRModule:
    """The model's module, for ids of shape (2, 9), with or without a mask of padded tokens."""
    family, sizes = _MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes, bos_token_id=1, eos_token_id=2)
    config._attn_implementation, config.use_cache = kind, False
    ids, padding = torch.zeros(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64)
    inputs = {"input_ids": ids} | ({"attention_mask": padding} if has_padding else {})
    dims = {0: torch.export.Dim("b", max=8), 1: torch.export.Dim("s", min=2, max=64)}
    model = Body(
        getattr(transformers, f"{family.removesuffix('Text')}{_CLASS[name]}")(config).eval()
    )
    dynamic = dict.fromkeys(inputs, dims) if is_dynamic else None
    return sits_tvm.from_torch(model, inputs, dynamic_shapes=dynamic)[0]


_CLASS = {"llama": "Model", "mistral": "Model", "gemma3": "TextModel", "gpt2": "Model"}


class Body(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def masks(mod: IRModule) -> list[tuple[Visibility, list[tirx.Expr]]]:
    """What is read from the mask of each attention, and the dimensions of its scores."""
    bindings = relax.analysis.get_var2val(mod["main"])
    found = []
    for call in bindings.values():
        name = getattr(getattr(call, "op", None), "name", "")
        if name == "relax.sits.attention":
            dims = [*list(call.args[0].ty.shape)[:3], list(call.args[1].ty.shape)[2]]
            found.append((visibility(call.args[3], bindings.get, dims), dims))
        elif name == "relax.nn.softmax":
            dims, scores = list(call.ty.shape), bindings[call.args[0]]
            shown, fill = additive_visibility(scores.args[1], bindings.get, dims)
            assert fill == float(torch.finfo(torch.float32).min)
            found.append((shown, dims))
    return found


_FEW = [("mistral", "eager", True, True)]


def _cases() -> list[Any]:
    every = [
        (name, kind, is_dynamic, has_padding)
        for name in _MODELS
        for kind in ("eager", "sdpa")
        for is_dynamic in (False, True)
        for has_padding in (False, True)
    ]
    return [pytest.param(*c, marks=() if c in _FEW else pytest.mark.slow) for c in every]


@pytest.mark.parametrize(("name", "kind", "is_dynamic", "has_padding"), _cases())
def test_masks_of_models_are_proved(
    name: str, kind: str, is_dynamic: bool, has_padding: bool
) -> None:
    found = masks(imported(name, kind, is_dynamic, has_padding))
    windows = [None if v.lower is None else int(v.lower) for v, _ in found]
    assert windows == _WINDOWS[name]
    for shown, dims in found:
        assert int(shown.upper) == 0
        assert len(shown.rest) == has_padding
        assert every_row_sees_a_key(shown, dims) is not has_padding
