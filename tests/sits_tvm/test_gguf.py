"""GGUF files: a small one written with the gguf package, whole and damaged in every way."""

import importlib
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm
from tvm import relax

import sits_tvm
from sits_tvm import from_pretrained
from sits_tvm.diagnostics import SitsError, collect
from sits_tvm.frontends import _gguf_blocks
from sits_tvm.frontends.gguf import GGUFFile, load_gguf

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.attn_q_norm": "model.layers.0.self_attn.q_norm",
    "blk.0.attn_k_norm": "model.layers.0.self_attn.k_norm",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}


TYPES = gguf.GGMLQuantizationType
Q8_0 = {"": TYPES.Q8_0}


def original(architecture="Qwen3", intermediate_size=96):
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim={"Qwen3": 128}.get(architecture, 16),
        tie_word_embeddings=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def quantized(value, kind):
    """Bytes of `value`; for Q4_K, which the gguf package only reads, of any numbers."""
    if kind is not TYPES.Q4_K:
        return gguf.quantize(value, kind)
    blocks = np.random.default_rng(0).integers(0, 256, (len(value), value.shape[1] // 256, 144))
    blocks[:, :, 1:4:2] = 20  # high bytes of both scales: 2^-10
    return blocks.astype("uint8").reshape(len(value), -1)


def write(path, model, skip=(), architecture="qwen3", kinds=Q8_0):
    """The model with matrices as `kinds` says; the values that a reader should find, by name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(model.config.head_dim)
    writer.add_value_length(model.config.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"t{i}" for i in range(40)])
    writer.add_token_scores([0.5] * 40)
    state, expected = model.state_dict(), {}
    for short, name in NAMES.items():
        if short in skip or f"{name}.weight" not in state:
            continue
        value = state[f"{name}.weight"].numpy()
        if value.ndim == 2:
            kind = kinds.get(short, kinds[""])
            packed = quantized(value, kind)
            value = gguf.dequantize(packed, kind)
            writer.add_tensor(f"{short}.weight", packed, raw_dtype=kind)
        else:
            writer.add_tensor(f"{short}.weight", value)
        expected[f"{name}.weight"] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.gguf"
    return path, write(path, original())


def refused(code, path):
    with pytest.raises(SitsError) as caught:
        load_gguf(path)
    assert {d.code for d in caught.value.diagnostics} == {code}
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_reads_what_the_gguf_package_reads(file):
    path, _ = file
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for name, field in ours.fields.items():
        found = [
            bytes(p) if isinstance(p, bytes) else p[0] for p in (field.parts[i] for i in field.data)
        ]
        want = [theirs.fields[name].parts[i] for i in theirs.fields[name].data]
        want = [bytes(w) if field.types[-1] == 8 else w[0] for w in want]
        assert found == want
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        np.testing.assert_array_equal(mine.data.reshape(-1), other.data.reshape(-1).view(np.uint8))


def test_other_threads_read_with_the_gguf_package(file, monkeypatch):
    """While transformers reads our header in its place."""
    path, _ = file
    hf = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    load, found = hf.load_gguf_checkpoint, []

    def load_beside(*args):
        with ThreadPoolExecutor() as pool:
            found.append(pool.submit(gguf.GGUFReader, path).result())
        return load(*args)

    monkeypatch.setattr(hf, "load_gguf_checkpoint", load_beside)
    load_gguf(path)
    assert type(found[0]) is gguf.GGUFReader


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_weights_are_the_dequantized_ones(file, dtype, monkeypatch):
    """Read two or three rows at a time, as those of a large model are."""
    path, expected = file
    monkeypatch.setattr(_gguf_blocks, "_ELEMENTS_AT_ONCE", 200)
    model, _ = load_gguf(path, getattr(torch, dtype) if dtype else None)
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name].numpy(), value.astype(dtype or "float32"))
    assert model.config.vocab_size == 40
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())  # no copy on the way to TVM


@pytest.mark.parametrize("architecture", ["Qwen3", "Llama"])
def test_codes_of_q4_0_are_taken_over(architecture, tmp_path):
    """Scales of both signs and zero; q and k of Llama have their rows in another order."""
    path, model = tmp_path / "tiny.gguf", original(architecture, 256)
    model.model.layers[0].mlp.up_proj.weight.data[:5] = 0
    kinds = {"": TYPES.Q4_0, "output": TYPES.Q8_0, "blk.0.ffn_down": TYPES.Q4_K}
    write(path, model, architecture=architecture.lower(), kinds=kinds)
    with collect() as notes:
        loaded, stored = load_gguf(path)
    (note,) = notes
    assert note.code == "gguf-dequantized"
    assert "Q4_K (1)" in note.message
    assert "Q8_0 (1)" in note.message
    left = ("lm_head.weight", "model.layers.0.mlp.down_proj.weight")
    matrices = {name: w for name, w in loaded.state_dict().items() if w.ndim == 2}
    assert stored.keys() == matrices.keys() - set(left)
    for name, weight in stored.items():
        np.testing.assert_array_equal(weight.dequantized(), matrices[name].numpy())
        assert (weight.codes.min(), weight.codes.max()) == (-8, 7)
        assert weight.scale.dtype == "float16"
    scales = np.concatenate([weight.scale.ravel() for weight in stored.values()])
    assert scales.min() < 0
    assert (scales == 0).sum() == 10
    q = quantized(model.model.layers[0].mlp.gate_proj.weight.detach().numpy(), TYPES.Q4_0)
    codes = stored["model.layers.0.mlp.gate_proj.weight"].codes
    first = q.reshape(-1)[2:18]  # the bytes of the first block, after its scale
    np.testing.assert_array_equal(codes[0, :32], [*(first % 16 - 8.0), *(first // 16 - 8.0)])


GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "blk.0.attn_norm": "h.0.ln_1",
    "blk.0.ffn_norm": "h.0.ln_2",
    "blk.0.attn_qkv": "h.0.attn.c_attn",
    "blk.0.attn_output": "h.0.attn.c_proj",
    "blk.0.ffn_up": "h.0.mlp.c_fc",
    "blk.0.ffn_down": "h.0.mlp.c_proj",
}


def test_rows_that_the_model_has_as_columns_are_dequantized(tmp_path):
    """GPT-2's; its embedding keeps its codes. What no model reads is told."""
    path = tmp_path / "tiny.gguf"
    config = transformers.GPT2Config(vocab_size=40, n_embd=64, n_layer=1, n_head=4)
    state = transformers.GPT2LMHeadModel(config).state_dict()
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    writer.add_token_list([f"t{i}" for i in range(40)])
    writer.add_tensor("rope_freqs.weight", np.ones(8, "float32"))
    expected = {}
    for short, name in GPT2_NAMES.items():
        for part in {"weight", "bias"} & {n.removeprefix(f"transformer.{name}.") for n in state}:
            value, turn = state[f"transformer.{name}.{part}"].numpy(), name.startswith("h.0.")
            if value.ndim == 1 or name == "wpe":
                writer.add_tensor(f"{short}.{part}", value)
                continue
            rows = np.ascontiguousarray(value.T if turn else value)
            packed = gguf.quantize(rows, TYPES.Q4_0)
            writer.add_tensor(f"{short}.{part}", packed, raw_dtype=TYPES.Q4_0)
            rows = gguf.dequantize(packed, TYPES.Q4_0)
            expected[f"transformer.{name}.{part}"] = rows.T if turn else rows
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with collect() as found:
        model, stored = load_gguf(path)
    assert [d.code for d in found] == ["weights-unused", "gguf-dequantized"]
    assert "not read, as the model has none such: rope_freqs.weight" in found[0].message
    assert "Q4_0 (4)" in found[1].message
    assert stored.keys() == {"transformer.wte.weight"}
    assert len(expected) == 5
    for name, value in expected.items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), value)


@pytest.mark.slow
def test_a_build_packs_them(tmp_path):
    """Embedding and head too, and whether INT4 was asked for or not."""
    path, model = tmp_path / "tiny.gguf", original("Llama")
    expected = write(path, model, architecture="llama", kinds={"": TYPES.Q4_0})
    mod, params = from_pretrained(path)
    ex = sits_tvm.build(mod, "llvm", params=params)
    matrices = {name for name, value in expected.items() if value.ndim == 2}
    assert {row.name for row in ex.report.quantized} == matrices
    ids = torch.tensor([[3, 17, 8, 30]])
    with torch.no_grad():
        want = load_gguf(path)[0](ids).logits.numpy()
    vm = relax.VirtualMachine(ex, tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(ids.numpy()), *ex.param_list).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_file_cut_off_anywhere_is_refused(file):
    path, _ = file
    whole = path.read_bytes()
    header, data = (0, 3, 23, 24, 100, 500), (len(whole) // 2, len(whole) - 40)
    for size in header + data:
        path.write_bytes(whole[:size])
        assert "again" in refused("gguf-damaged" if size in header else "gguf-truncated", path)


def test_tensors_that_overlap_are_refused(file):
    """Each of many could be as large as the file."""
    path, _ = file
    data, tensor = bytearray(path.read_bytes()), GGUFFile(path).tensors[1]
    after = data.index(tensor.name.encode()) + len(tensor.name)
    offset = after + 4 + 8 * int.from_bytes(data[after : after + 4], "little") + 4
    data[offset : offset + 8] = bytes(8)
    path.write_bytes(data)
    text = refused("gguf-damaged", path)
    assert tensor.name in text
    assert "overlap at offset 0" in text


def test_other_files_are_named(file):
    path, _ = file
    whole = path.read_bytes()
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    assert "starts with b'PK" in refused("gguf-damaged", path)
    path.write_bytes(whole[:4] + struct.pack("<I", 9) + whole[8:])
    assert "version 9" in refused("gguf-not-supported", path)
    path.write_bytes(whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:])
    refused("gguf-damaged", path)


def test_unknown_architecture_and_missing_weights(tmp_path):
    path = tmp_path / "other.gguf"
    write(path, original(), architecture="no-such")
    assert "no-such" in refused("gguf-not-supported", path)
    write(path, original(), skip=("blk.0.ffn_up", "output_norm"))
    text = refused("weights-incomplete", path)
    assert "model.layers.0.mlp.up_proj.weight is missing" in text
    assert "model.norm.weight is missing" in text
