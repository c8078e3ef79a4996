"""from_pretrained against transformers' own eager attention."""

import numpy as np
import pytest
from tiny_models import DECODERS, imported, sites, tiny, tokens
from torch_runs import run, runner
from tvm.ir import assert_structural_equal

from sits_tvm.diagnostics import collect
from sits_tvm.frontends.pretrained import from_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ALIKE = {"Mistral", "Phi3", "Qwen2"}  # to Llama
LENGTHS = [(1, 1), (1, 7), (3, 5), (2, 17)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in DECODERS]
)
def test_one_symbolic_module_agrees_with_eager(name):
    """Windows of 5 are crossed at 7 and 17 tokens; one token is the shortest input."""
    model, mod, params, notes = imported(name)
    assert not notes
    assert len(sites(mod)) == model.config.num_hidden_layers
    assert mod["main"].params[0].name == "input_ids"
    assert mod["main"].attrs["num_input"] == 1
    assert_structural_equal(mod.get_global_var("main").ty, mod["main"].ty, map_free_vars=True)
    compiled = runner(mod, params)
    for batch, length in LENGTHS:
        ids = tokens(batch, length)
        with torch.no_grad():
            want = model(ids, use_cache=False).logits.numpy()
        np.testing.assert_allclose(compiled(ids), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_window_softcap_and_scale_arrive_as_attributes():
    _, mod, _, _ = imported("Gemma2")
    assert [(a["causal"], a["window"], a["softcap"]) for a in sites(mod)] == [
        (0, 5, 2.0),
        (0, 0, 2.0),
    ]
    assert all(a["scale"] == pytest.approx(7**-0.5) for a in sites(mod))


def test_keeps_the_last_logits_only():
    model, ids = tiny("Llama"), tokens(2, 6)
    got = run(*from_pretrained(model, logits_to_keep=1), ids)
    with torch.no_grad():
        want = model(ids).logits[:, -1:].numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_leaves_the_model_as_it_was():
    model = tiny("Gemma3Text", attention="sdpa", **DECODERS["Gemma3Text"]).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    from_pretrained(model)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(model(tokens(1, 4)).logits.grad_fn, object)


def test_parameters_have_the_models_names_and_memory():
    model, mod, params, _ = imported("Gemma3Text")
    names = [p.name for p in mod["main"].params[1:]]
    assert names == list(params)
    assert set(names) == set(model.state_dict()) - {"lm_head.weight"}  # tied to the embedding
    at = {name: value.data_ptr() for name, value in model.state_dict().items()}
    aligned = [name for name in params if at[name] % 64 == 0]  # TVM takes no other address
    assert aligned
    assert all(np.from_dlpack(params[name]).ctypes.data == at[name] for name in aligned)


def test_dtype_converts_a_copy():
    model, ids = tiny("Llama"), tokens(1, 5)
    mod, params = from_pretrained(model, dtype="float16")
    assert {str(p.dtype) for p in params.values()} == {"float16"}
    assert model.dtype == torch.float32
    with torch.no_grad():
        want = model(ids).logits.numpy()
    np.testing.assert_allclose(run(mod, params, ids), want, atol=5e-3 * np.abs(want).max())


def test_longest_sequence_is_a_bound():
    mod, _ = from_pretrained(tiny("Llama"), max_seq_len=40)
    assert dict(mod["main"].attrs["tir_var_upper_bound"].items()) == {"s": 40}


ALIBI = {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4}
BIDIRECTIONAL = {"use_bidirectional_attention": True, "layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Bloom", ALIBI, "0 of 1 layers"),
        ("Gemma3Text", BIDIRECTIONAL, "neither causal nor a sliding window"),
    ],
)
def test_other_attention_keeps_its_masks_and_says_so(name, options, reason):
    model, ids = tiny(name, **options), tokens(2, 6)
    with collect() as notes:
        mod, params = from_pretrained(model)
    assert [note.code for note in notes] == ["attention-not-recognised"]
    assert reason in notes[0].message
    assert [p.name for p in mod["main"].params[:2]] == ["input_ids", "attention_mask"]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits.numpy()[mask.bool().numpy()]
    got = run(mod, params, ids, mask)[mask.bool().numpy()]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_encoder_takes_a_padding_mask_at_any_length():
    options = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    model = tiny("Bert", "AutoModel", num_attention_heads=4, **options)
    compiled = runner(*from_pretrained(model))
    for batch, length in LENGTHS:
        ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.int64)
        mask[0, (length + 1) // 2 :] = 0
        with torch.no_grad():
            want = model(ids, attention_mask=mask).last_hidden_state.numpy()
        np.testing.assert_allclose(compiled(ids, mask), want, atol=1e-5 * np.abs(want).max())


def test_masks_are_read_off_what_the_model_asks_for():
    from transformers import masking_utils as hf

    from sits_tvm.frontends._hf_attention import Mask, NotExpressible, _read_mask

    def read(mask_function):
        return _read_mask(mask_function=mask_function)

    assert read(hf.causal_mask_function) == Mask(True, 0)
    assert read(hf.bidirectional_mask_function) == Mask(False, 0)
    for window in (1, 2, 5, 512, 131072):
        assert read(hf.sliding_window_causal_mask_function(window)) == Mask(True, window)
    for other in (
        hf.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        hf.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)),
        hf.sliding_window_bidirectional_mask_function(5),
    ):
        with pytest.raises(NotExpressible, match="neither causal nor a sliding window"):
            read(other)


def test_arguments_with_a_meaning_are_not_dropped():
    from sits_tvm.frontends._hf_attention import Mask, NotExpressible, _read

    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotExpressible, match="Linear passes s_aux"):
        _read(torch.nn.Linear(1, 1), q, q, q, Mask(True, 0), s_aux=torch.zeros(2))


def test_layers_that_ignore_the_interface_are_noticed(monkeypatch):
    """One of two layers by itself would run without any mask in the traced model."""
    model = tiny("Llama", num_hidden_layers=2)
    layer = model.model.layers[1].self_attn
    monkeypatch.setattr(
        layer, "forward", lambda hidden_states, **_: (layer.o_proj(hidden_states), None)
    )
    with collect() as notes:
        from_pretrained(model)
    assert "1 of 2 layers" in notes[0].message
