"""Compile cost against depth: `lower` of a Llama-shaped module, shapes only, 2 to 80 layers."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import tvm
from tvm import IRModule
from tvm.relax.frontend import nn

import sits_tvm
from sits_tvm import Config, QuantSpec
from sits_tvm.report_tables import render_table

HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY = 1024, 16, 4, 2816, 32000
HEAD_DIM = HIDDEN // HEADS
DEPTHS = (2, 8, 32, 80)


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


def llama(layers: int) -> IRModule:
    """forward(input_ids (1, "s"), weights): symbolic sequence, no values."""
    spec = {"forward": {"input_ids": nn.spec.Tensor([1, "s"], "int32")}}
    mod, params = Llama(layers).export_tvm(spec)
    func = mod["forward"]
    inputs = len(func.params) - len(params)
    mod["forward"] = func.with_attr("num_input", inputs)
    return mod


def seconds_to_lower(layers: int) -> float:
    mod = llama(layers)
    start = time.perf_counter()
    sits_tvm.lower(mod, "llvm -mcpu=native", config=Config(quant=QuantSpec()))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    seconds_to_lower(1)
    seconds = {layers: seconds_to_lower(layers) for layers in DEPTHS}
    rows = [[str(n), f"{t:.2f}", f"{1000 * t / n:.0f}"] for n, t in seconds.items()]
    print(f"lower() of a Llama-shaped module, INT4, TVM {tvm.__version__}")
    print(render_table(["layers", "seconds", "ms per layer"], rows))
    if args.json:
        args.json.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()
