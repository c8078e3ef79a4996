"""Fake quantize of a 4096 x 4096 float32 weight on this CPU: ours against torch, alternated.

    PYTHONPATH=. python tests/benchmarks/bench_fake_quantize.py [--rounds 7] [--json F]

The ratio is torch's median time over ours: above 1 we are faster. Our backward also gives the
gradient of the scales; torch's gives it only in its "learnable" ops, a row of their own. torch has
no per-group op: groups are compared with its per-channel one.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import tvm
from tvm import relax

from relax_passes.op import fake_quantize
from relax_passes.op._fake_quantize_gradient import fake_quantize_grad
from sits_tvm import build
from tests.benchmarks import figures
from tests.benchmarks.rounds import alternate

THREADS = int(os.environ.setdefault("TVM_NUM_THREADS", "2"))
SIZE, STEP = 4096, 0.3
GRANULARITIES = {
    "per tensor": ((), {}),
    "per channel": ((SIZE,), {"axis": 0}),
    "groups of 128": ((SIZE, SIZE // 128), {"group_size": 128}),
    "groups of 32": ((SIZE, SIZE // 32), {"group_size": 32}),
}
Runs = dict[str, Callable[[], object]]


def ours(x: np.ndarray, gy: np.ndarray, scale: np.ndarray, form: dict) -> Runs:
    """One executable with both directions."""
    bb = relax.BlockBuilder()
    for name in ("forward", "backward"):
        args = [
            relax.Var(n, relax.TensorType(v.shape, "float32"))
            for n, v in (("gy", gy), ("x", x), ("scale", scale))
        ]
        call = fake_quantize(*args[1:], **form)
        if name == "backward":
            call = fake_quantize_grad(*args, **dict(call.attrs.items()))
        with bb.function(name, args):
            with bb.dataflow():
                out = bb.emit_output(call)
            bb.emit_func_output(out)
    executable = build(bb.get(), f"llvm -mcpu=native -num-cores={THREADS}")
    vm = relax.VirtualMachine(executable, tvm.cpu())
    tensors = [tvm.runtime.tensor(value) for value in (gy, x, scale)]
    return {
        f"ours {name}": functools.partial(vm[name], *tensors) for name in ("forward", "backward")
    }


def torch_runs(x: np.ndarray, gy: np.ndarray, per_tensor: bool) -> Runs:
    """Forward without a graph, backward of a graph built once; plain and learnable ops."""
    weight, upstream = torch.tensor(x, requires_grad=True), torch.tensor(gy)
    scale = torch.full((1 if per_tensor else SIZE,), STEP, requires_grad=True)
    zero = torch.zeros(scale.shape)
    if per_tensor:
        plain = functools.partial(torch.fake_quantize_per_tensor_affine, weight, STEP, 0, -8, 7)
        learnable = torch._fake_quantize_learnable_per_tensor_affine(weight, scale, zero, -8, 7)
    else:
        plain = functools.partial(
            torch.fake_quantize_per_channel_affine, weight, scale.detach(), zero.int(), 0, -8, 7
        )
        learnable = torch._fake_quantize_learnable_per_channel_affine(weight, scale, zero, 0, -8, 7)
    y = plain()
    grad = functools.partial(torch.autograd.grad, grad_outputs=upstream, retain_graph=True)
    return {
        "torch forward": torch.no_grad()(plain),
        "torch backward": lambda: grad(y, [weight]),
        "torch backward, learnable": lambda: grad(learnable, [weight, scale]),
    }


def bench(rng: np.random.Generator, rounds: int) -> list[dict]:
    x, gy = (rng.standard_normal((SIZE, SIZE), "float32") for _ in range(2))
    table = []
    for case, (shape, form) in GRANULARITIES.items():
        scale = np.full(shape, STEP, "float32")
        runs = {**torch_runs(x, gy, shape == ()), **ours(x, gy, scale, form)}
        peers = {name for name in runs if name.startswith("torch")}
        times = alternate(runs, rounds, peers=peers)
        seconds = {name: float(np.median(each)) for name, each in times.items()}
        for peer, name in (
            ("torch forward", "ours forward"),
            ("torch backward", "ours backward"),
            ("torch backward, learnable", "ours backward"),
        ):
            row = {"case": case, "peer": peer, "ms": 1e3 * seconds[name]}
            table.append({**row, "x torch": seconds[peer] / seconds[name]})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    table = bench(np.random.default_rng(0), options.rounds)
    print(figures.heading())
    print(f"{'case':16} {'against':28} {'ours, ms':>9} {'x torch':>8}")
    for row in table:
        print(f"{row['case']:16} {row['peer']:28} {row['ms']:9.1f} {row['x torch']:8.2f}")
    figures.write(options.json, rows=table)


if __name__ == "__main__":
    main()
