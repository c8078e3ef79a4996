"""Trained models: every block of attention is recognised, by every import, with torch's numbers.

Nothing of a layer is left in plain ops, and with all passes on ("exact") the perplexity of real
text and the embeddings of sentences are those of torch.
"""

import numpy as np
import pytest
import tvm
from tvm import relax

import sits_tvm
from tests.trained_models import gemma_file, minilm_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

CPU = "llvm -mcpu=native"
TOKENS = 640  # longer than the window of Gemma's local layers, 512
SENTENCES = [
    "A ship in harbour is safe, but that is not what ships are built for.",
    "Boats stay dry ashore.",
    "The attention of every head is a weighted mean of values, and padding must not be part of it.",
]
IMPORTS = ["from_pretrained", "eager", "eager-dynamic", "sdpa", "sdpa-dynamic"]
by_every_import = pytest.mark.parametrize("how", IMPORTS)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


class Hidden(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def imported(wrapper, model, inputs, how, **dims):
    """The module and weights; `dims`: for each axis its Dim, used where `how` is dynamic."""
    if how == "from_pretrained":
        return sits_tvm.from_pretrained(model)
    implementation, _, dynamic = how.partition("-")
    model.set_attn_implementation(implementation)
    shapes = {name: {0: dims["b"], 1: dims["s"]} for name in inputs} if dynamic else None
    return sits_tvm.from_torch(wrapper(model).eval(), inputs, dynamic_shapes=shapes)


def built(mod, params):
    """With all passes on: what is recognised, and the module as a function of arrays."""
    executable = sits_tvm.build(mod, CPU, params=params)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    recognised = [row.recognised for row in executable.report.attention]
    return recognised, lambda *arrays: main(*arrays, *executable.param_list).numpy()


@pytest.fixture(scope="module")
def gemma():
    """The model, and a text as ids (1, 640), opened by the beginning-of-sequence token."""
    from sits_tvm.frontends.gguf import load_gguf
    from tests.benchmarks.main_job import TEXT

    file = gemma_file()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    ids = tokenizer(TEXT.read_text(), add_special_tokens=False)["input_ids"][: TOKENS - 1]
    return load_gguf(file)[0], np.array([[tokenizer.bos_token_id, *ids]])


@by_every_import
def test_gemma(gemma, how):
    """18 of 18; perplexity equal to 1e-4 of it."""
    from tests.benchmarks.main_job import perplexity

    model, ids = gemma
    dims = {"b": torch.export.Dim.STATIC, "s": torch.export.Dim("s", min=2, max=1024)}
    inputs = {"input_ids": torch.from_numpy(ids)}
    recognised, run = built(*imported(Logits, model, inputs, how, **dims))
    assert recognised == [True] * 18

    def by_torch(window):
        with torch.no_grad():
            return Logits(model)(torch.from_numpy(window)).numpy()

    want = perplexity(ids, by_torch)
    found = perplexity(ids, run)
    print(f"\nGemma 3 270M, {how}: perplexity {found:.6f}, torch {want:.6f}")
    assert found == pytest.approx(want, rel=1e-4)


@pytest.fixture(scope="module")
def minilm():
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    return model, {name: inputs[name] for name in ("input_ids", "attention_mask")}


def embeddings(hidden, mask):
    """Mean over the tokens that are no padding, (b, s, hidden) -> (b, hidden), of length 1."""
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


@by_every_import
def test_minilm(minilm, how):
    """6 of 6; embeddings equal to 1e-4 of their length, in a batch with padding."""
    model, inputs = minilm
    dims = {"b": torch.export.Dim("b", max=8), "s": torch.export.Dim("s", min=2, max=512)}
    recognised, run = built(*imported(Hidden, model, inputs, how, **dims))
    assert recognised == [True] * 6
    with torch.no_grad():
        hidden = Hidden(model)(**inputs).numpy()
    arrays = [x.numpy() for x in inputs.values()]
    assert arrays[1].min() == 0
    want = embeddings(hidden, arrays[1])
    found = embeddings(run(*arrays), arrays[1])
    difference = np.linalg.norm(found - want, axis=-1).max()
    print(f"\nMiniLM-L6-v2, {how}: embeddings differ by {difference:.1e} of their length")
    assert difference < 1e-4
