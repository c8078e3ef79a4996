"""How far INT4 moves the gradients of trained models, and how much of it H·ΔW explains.

Three small models, three seeds each: a GPT on the text of Python's help topics, an MLP and a
convolutional net on scikit-learn's digits. PyTorch trains them; gradients and Hessian-vector
products are those of the compiled Relax adjoints. Prints a table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.op import fake_quantize
from sits_tvm import differentiate, from_torch
from sits_tvm.gradient_check.fidelity import fidelity_rows
from sits_tvm.gradient_check.gate import run_gate
from sits_tvm.gradient_check.result import FidelityRow
from sits_tvm.host_run import CompileOnce
from sits_tvm.pipeline import run_on_host
from sits_tvm.report_tables import render_table
from tests.benchmarks import figures

GROUP = 32
SEEDS = (0, 1, 2)
LAYERS, WIDTH, HEADS, CONTEXT = 3, 128, 4, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        split = self.qkv(self.norm1(x)).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5 + mask
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(symbols, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols, bias=False)
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), -1e9).triu(1))
        self.apply(_small_weights)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x, self.mask)
        logits = self.head(self.norm(x))
        return F.nll_loss(F.log_softmax(logits.flatten(0, 1), -1), targets.flatten())


def _small_weights(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)


class Classifier(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(F.log_softmax(self.body(x), -1), labels)


def mlp() -> nn.Module:
    body = (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    return Classifier(nn.Sequential(*body))


def conv_net() -> nn.Module:
    convolutions = (
        nn.Conv2d(1, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1, stride=2), nn.SiLU(),
    )  # fmt: skip
    return Classifier(nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 10)))


def text_batches() -> tuple[int, Callable[[int], tuple[torch.Tensor, ...]]]:
    text = "\n".join(topics[name] for name in sorted(topics))
    symbols = sorted(set(text))
    ids = torch.tensor([symbols.index(c) for c in text])

    def batch(size: int) -> tuple[torch.Tensor, ...]:
        starts = torch.randint(len(ids) - CONTEXT - 1, (size,))
        windows = torch.stack([ids[s : s + CONTEXT + 1] for s in starts])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    return len(symbols), batch


def digit_batches(shape: tuple[int, ...]) -> Callable[[int], tuple[torch.Tensor, ...]]:
    digits = load_digits()
    images = torch.tensor(digits.data / 8 - 1, dtype=torch.float32).reshape(-1, *shape)
    labels = torch.tensor(digits.target)

    def batch(size: int) -> tuple[torch.Tensor, ...]:
        chosen = torch.randint(len(images), (size,))
        return images[chosen], labels[chosen]

    return batch


def train(model: nn.Module, batch: Callable, steps: int, size: int, rate: float) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        loss = model(*batch(size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def absmax_scale(weight: np.ndarray) -> np.ndarray:
    """amax / 7 in float16 values: per group of 32 along K, per output channel for convolutions."""
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP) if weight.ndim == 2 else weight
    axes = -1 if weight.ndim == 2 else tuple(range(1, weight.ndim))
    return (np.abs(groups).max(axes) / 7).astype("float16").astype("float32")


@mutator
class Quantize(PyExprMutator):
    """Reads each of `weights` through a fake quantization with its scale."""

    def __init__(self, mod: IRModule, scales: dict[str, relax.Var]) -> None:
        super().__init__(mod)
        self.scales, self.made = scales, {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        args = [self.quantized(arg) for arg in call.args]
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def quantized(self, arg: Any) -> Any:
        name = arg.name if isinstance(arg, relax.Var) else ""
        if name not in self.scales:
            return arg
        if name not in self.made:
            how = {"group_size": GROUP} if arg.ty.ndim == 2 else {"axis": 0}
            self.made[name] = self.builder_.emit(fake_quantize(arg, self.scales[name], **how))
        return self.made[name]


def quantize(mod: IRModule, params: dict[str, np.ndarray]) -> IRModule:
    """Weights of linear layers and convolutions through INT4, scales as further parameters."""
    func = mod["main"]
    names = [n for n in params if params[n].ndim >= 2 and "tokens" not in n and "posi" not in n]
    scales = {
        n: relax.Var(f"{n}.scale", relax.TensorType(absmax_scale(params[n]).shape, "float32"))
        for n in names
    }
    made = Quantize(mod, scales).visit_expr(func)
    out = mod.clone()
    params_ = [*made.params, *scales.values()]
    out["main"] = relax.Function(params_, made.body, made.ret_ty, True, func.attrs)
    params.update({f"{n}.scale": absmax_scale(params[n]) for n in names})
    return differentiate(out, "main", [*names, *(f"{n}.scale" for n in names)])


def measure(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], compile_: CompileOnce
) -> tuple[list[FidelityRow], float]:
    """Rows of the report, and the worst relative L2 error of the gate at the same point."""
    mod, tensors = from_torch(model.eval(), inputs)
    params = {name: value.numpy() for name, value in tensors.items()}
    mod = quantize(mod, params)
    names = [p.name for p in mod["main"].params]
    args = {**dict(zip(names, (x.numpy() for x in inputs), strict=False)), **params}
    args = {name: args[name] for name in names}
    rows, found = run_gate(mod, "main", compile_, given=args, seeds=(0,), loss_scales=(1.0,))
    assert not found, found
    worst = max(row.relative_l2 for row in rows if row.vector == "given" and row.status == "pass")
    return fidelity_rows(mod, "main", compile_, args), worst


def models() -> dict[str, tuple[Callable[[], nn.Module], Callable, int, int, float]]:
    """Name to (model, batches, steps, batch size, learning rate)."""
    symbols, text = text_batches()
    return {
        "GPT": (lambda: Gpt(symbols), text, 400, 16, 1e-3),
        "MLP": (mlp, digit_batches((64,)), 400, 64, 1e-3),
        "conv net": (conv_net, digit_batches((1, 8, 8)), 200, 64, 1e-3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, help="of training; fewer for a quick look")
    parser.add_argument("--models", nargs="*", default=["GPT", "MLP", "conv net"])
    options = parser.parse_args()
    lines, measured = [], {}
    for name in options.models:
        make, batch, steps, size, rate = models()[name]
        compile_, results = CompileOnce(run_on_host), []
        for seed in SEEDS:
            torch.manual_seed(seed)
            start, model = time.perf_counter(), make()
            loss = train(model, batch, options.steps or steps, size, rate)
            rows, gate = measure(model, batch(size), compile_)
            seconds = time.perf_counter() - start
            results.append({"seed": seed, "loss": loss, "gate": gate, "seconds": seconds,
                            "rows": [asdict(row) for row in rows]})  # fmt: skip
            lines.append([name, str(seed), f"{loss:.3f}", f"{gate:.1e}", *_figures(rows)])
            print(*lines[-1], f"{seconds:.0f} s", flush=True)
        measured[name] = results
    header = ["model", "seed", "loss", "gate relL2", "tensors", "relL2 median", "max",
              "min cosine", "clipped", "residual median", "max"]  # fmt: skip
    print(f"\n{render_table(header, lines)}")
    figures.write(options.json, models=measured)


def _figures(rows: list[FidelityRow]) -> list[str]:
    errors, residuals = [r.relative_l2 for r in rows], [r.residual for r in rows]
    return [
        str(len(rows)), f"{median(errors):.3f}", f"{max(errors):.3f}",
        f"{min(r.cosine for r in rows):.3f}", f"{max(r.clipped for r in rows):.2%}",
        f"{median(residuals):.3f}", f"{max(residuals):.3f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
