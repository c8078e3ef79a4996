"""from_pretrained: directories and files, whole, damaged, and one trained model."""

import json

import numpy as np
import pytest
from tiny_models import imported, sites, tiny
from torch_runs import run

from sits_tvm.diagnostics import SitsError
from sits_tvm.frontends.pretrained import from_pretrained
from tests.trained_models import gemma_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


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
    for name in ("../model-1.safetensors", "/model-1.safetensors", 1):
        index["weight_map"]["a"] = name
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "index.json" in refused("index-damaged", tmp_path)
    for damaged in ("{", "{}", "[]", "[" * 100000):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        assert "index.json" in refused("index-damaged", tmp_path)


def test_damaged_directories(tmp_path):
    tiny("Llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert str(tmp_path) in refused("model-not-loaded", tmp_path)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**7}))
    assert "config.json has 10000000 layers" in refused("config-damaged", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    said = refused("model-not-loaded", tmp_path)
    assert "no_such_model" in said
    assert "help: see the message of transformers" in said


def test_quantization_that_is_no_table(tmp_path):
    tiny("Qwen2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    groups = {"quant_method": "compressed-tensors", "config_groups": {"group_0": 4}}
    for declared in ("gptq", [4], {"quant_method": ["gptq"]}, groups):
        config["quantization_config"] = declared
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert f"{tmp_path}: quantization_config" in refused("packed-checkpoint", tmp_path)


def test_nobody_is_asked_to_trust_code(tmp_path, capfd):
    tiny("Qwen2").save_pretrained(tmp_path)
    config = {"model_type": "other", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit")
    assert "custom code" in refused("model-not-loaded", tmp_path)
    assert capfd.readouterr().out == ""


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
    from sits_tvm.frontends.gguf import load_gguf

    path = gemma_file()
    mod, params = from_pretrained(path, logits_to_keep=1)
    assert len(sites(mod)) == 18
    assert sum(np.prod(p.shape) for p in params.values()) == 268_098_176
    ids = torch.tensor([[2, 818, 5279, 529, 7001, 563]])
    with torch.no_grad():
        want = load_gguf(path)[0](ids).logits[:, -1:].numpy()
    got = run(mod, params, ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
