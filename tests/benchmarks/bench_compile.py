"""What compiling costs, by shapes only: `lower` of a Llama-shaped module against its depth, and
`build` of two layers of Llama-3-8B in a new process, without and with what is kept from before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tvm
from tvm import IRModule
from tvm.relax.frontend import nn

import sits_tvm
from sits_tvm import Config, QuantSpec
from sits_tvm.report_tables import render_table
from tests.benchmarks import figures

HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY = 1024, 16, 4, 2816, 32000
HEAD_DIM = HIDDEN // HEADS
DEPTHS = (2, 8, 32, 80)
LLAMA3 = {
    **{"HIDDEN": 4096, "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "INNER": 14336},
    "VOCABULARY": 512,
}
"""Layers of Llama-3-8B; the embedding and the head cost the same for fewer tokens."""

TARGETS = ("llvm -mcpu=native", "cuda -arch=sm_90a")
QUANT = Config(quant=QuantSpec())


class Layer(nn.Module):
    """Attention with grouped heads and a gated MLP, each behind an RMS norm."""

    def __init__(self) -> None:
        self.attention_norm = nn.RMSNorm(HIDDEN, axes=-1, bias=False)
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.mlp_norm = nn.RMSNorm(HIDDEN, axes=-1, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = x + self.attend(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down_proj(nn.op.silu(self.gate_proj(y)) * self.up_proj(y))

    def attend(self, x: nn.Tensor) -> nn.Tensor:
        batch, length, _ = x.shape
        q = nn.op.reshape(self.q_proj(x), (batch, length, HEADS, HEAD_DIM))
        k = nn.op.reshape(self.k_proj(x), (batch, length, KV_HEADS, HEAD_DIM))
        v = nn.op.reshape(self.v_proj(x), (batch, length, KV_HEADS, HEAD_DIM))
        k, v = (nn.op.repeat(part, HEADS // KV_HEADS, axis=2) for part in (k, v))
        q, k, v = (nn.op.permute_dims(part, [0, 2, 1, 3]) for part in (q, k, v))
        scores = nn.op.matmul(q, nn.op.permute_dims(k, [0, 1, 3, 2])) * HEAD_DIM**-0.5
        out = nn.op.matmul(nn.op.softmax(scores, axis=-1), v)
        out = nn.op.permute_dims(out, [0, 2, 1, 3])
        return self.o_proj(nn.op.reshape(out, (batch, length, HEADS * HEAD_DIM)))


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = nn.RMSNorm(HIDDEN, axes=-1, bias=False)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: nn.Tensor) -> nn.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def llama(
    layers: int, batch: int | str = 1, length: int | str = "s", dtype: str = "float32"
) -> IRModule:
    """forward(input_ids (batch, length), weights), no values."""
    spec = {"forward": {"input_ids": nn.spec.Tensor([batch, length], "int32")}}
    model = Llama(layers)
    model.to(dtype)
    mod, params = model.export_tvm(spec)
    func = mod["forward"]
    inputs = len(func.params) - len(params)
    mod["forward"] = func.with_attr("num_input", inputs)
    return mod


def seconds_to_lower(layers: int) -> float:
    mod = llama(layers)
    start = time.perf_counter()
    sits_tvm.lower(mod, "llvm -mcpu=native", config=QUANT)
    return time.perf_counter() - start


def build(target: str) -> None:
    """Build once, and print the CPU seconds of this process, and of the tools that it ran."""
    globals().update(LLAMA3)
    sits_tvm.build(llama(2, "b", "s", "float16"), target, config=QUANT)
    own, tools = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = {"own": own.ru_utime + own.ru_stime, "tools": tools.ru_utime + tools.ru_stime}
    print(json.dumps(seconds))


def seconds_to_build(target: str) -> dict[str, dict[str, float]]:
    """Of a first build and of a second one, each in a new process, its start included."""
    with tempfile.TemporaryDirectory() as cache:
        return {name: _seconds_of_process(target, cache) for name in ("cold", "cached")}


def _seconds_of_process(target: str, cache: str) -> dict[str, float]:
    command, start = [sys.executable, __file__, "--build", target], time.perf_counter()
    env = {**os.environ, "SITS_TVM_CACHE": cache}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
    return {"wall": time.perf_counter() - start, **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--build", metavar="TARGET", help="build once, and print its seconds")
    args = parser.parse_args()
    if args.build:
        build(args.build)
        return
    seconds_to_lower(1)
    seconds = {layers: seconds_to_lower(layers) for layers in DEPTHS}
    rows = [[str(n), f"{t:.2f}", f"{1000 * t / n:.0f}"] for n, t in seconds.items()]
    print(f"lower() of a Llama-shaped module, INT4, TVM {tvm.__version__}")
    print(render_table(["layers", "seconds", "ms per layer"], rows))
    builds = {target: seconds_to_build(target) for target in TARGETS}
    print(f"\nbuild() of two layers of Llama-3-8B, INT4, on {os.cpu_count()} cores")
    header = ["target", "build", "seconds", "CPU seconds", "and of nvcc, nvdisasm"]
    print(render_table(header, [_row(t, n, s) for t, b in builds.items() for n, s in b.items()]))
    figures.write(args.json, lower=seconds, build=builds)


def _row(target: str, name: str, seconds: dict[str, float]) -> list[str]:
    return [target, name, *(f"{seconds[key]:.1f}" for key in ("wall", "own", "tools"))]


if __name__ == "__main__":
    main()
