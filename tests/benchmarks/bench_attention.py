"""Attention on this CPU: the fused kernel against plain ops, TVM's own lowering, and torch.

    PYTHONPATH=. python tests/benchmarks/bench_attention.py [--rounds 7] [--json F]

All are alternated in one run, float32. Times are the least of all rounds, as other work on the
machine only adds; the ratio is to the fused kernel: above 1 that is faster. TVM's own lowering is
so slow that it runs once. Memory is what a run adds to the largest resident size of a process of
its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from tvm import IRModule, relax

import sits_tvm
from relax_passes.lower_attention import LowerAttention
from relax_passes.op import attention
from sits_tvm import parse_target
from tests.benchmarks import figures
from tests.benchmarks.rounds import alternate

THREADS = int(os.environ.setdefault("TVM_NUM_THREADS", "2"))
TARGET = parse_target(f"llvm -mcpu=native -num-cores={THREADS}")
HEADS, KV_HEADS, WIDTH = 16, 4, 64
DECODE_KEYS = (1024, 2048, 4096, 8192)
MEMORY_LENGTHS = (2048, 4096, 8192)

Shapes = list[tuple[int, int, int, int]]


def shapes_of(queries: int, keys: int, kv_heads: int = KV_HEADS) -> Shapes:
    return [(1, HEADS, queries, WIDTH), (1, kv_heads, keys, WIDTH), (1, kv_heads, keys, WIDTH)]


def module(shapes: Shapes) -> IRModule:
    types = [relax.TensorType(shape, "float32") for shape in shapes]
    args = [relax.Var(name, ty) for name, ty in zip("qkv", types, strict=True)]
    bb = relax.BlockBuilder()
    with bb.function("main", args):
        bb.emit_func_output(bb.emit(attention(*args, causal="bottom_right")))
    return bb.get()


def fused(shapes: Shapes) -> Callable[..., Any]:
    return relax.VirtualMachine(sits_tvm.build(module(shapes), TARGET), tvm.cpu())["main"]


def plain(shapes: Shapes) -> Callable[..., Any]:
    built = sits_tvm.build(module(shapes), TARGET, config=sits_tvm.Config(attention="off"))
    return relax.VirtualMachine(built, tvm.cpu())["main"]


def tvm_default(shapes: Shapes) -> Callable[..., Any]:
    mod = LowerAttention()(module(shapes))
    pipeline = relax.get_default_pipeline(TARGET)
    compiled = tvm.compile(mod, TARGET, relax_pipeline=pipeline)
    return relax.VirtualMachine(compiled, tvm.cpu())["main"]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Bottom-right: for one query all keys are visible."""
    is_causal = q.shape[2] > 1
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=True
    )


def compare(case: str, shapes: Shapes, rounds: int, once: dict[str, Any]) -> list[dict]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, "float32") for shape in shapes]
    tensors, torch_tensors = map(list, (map(tvm.runtime.tensor, arrays), map(torch.tensor, arrays)))
    calls: dict[str, Callable[[], object]] = {"torch": lambda: sdpa(*torch_tensors)}
    for name, build in ({"fused": fused, "plain ops": plain} | once).items():
        kernel = build(shapes)
        calls[name] = lambda kernel=kernel: kernel(*tensors)
    repeat = 1 if shapes[0][2] > 1 else 20
    runs = {name: partial(_repeated, call, repeat) for name, call in calls.items()}
    seconds = alternate(runs, rounds, peers={"torch"}, once=once)
    least = {name: float(np.nanmin(each)) / repeat for name, each in seconds.items()}
    return [
        {"case": case, "kernel": name, "ms": 1e3 * value, "over fused": value / least["fused"]}
        for name, value in least.items()
    ]


def _repeated(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def resident(field: str) -> int:
    """KiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure_memory(length: int) -> int:
    """KiB that a run of the fused kernel adds to the largest resident size."""
    shapes = shapes_of(length, length)
    kernel = fused(shapes)
    warm = [tvm.runtime.tensor(np.ones(shape, "float32")) for shape in shapes]
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kernel(*warm)
    return resident("VmHWM") - before


def memory_table() -> list[dict]:
    table = []
    for length in MEMORY_LENGTHS:
        command = [sys.executable, __file__, "--memory", str(length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        output, scores = 4 * HEADS * length * WIDTH, 4 * HEADS * length * length
        table.append(
            {
                "S": length,
                "added MiB": int(done.stdout.split()[-1]) / 1024,
                "output MiB": output / 2**20,
                "scores MiB": scores / 2**20,
            }
        )
    return table


def show(rows: list[dict]) -> None:
    print("  ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        cells = (f"{x:12.3f}" if isinstance(x, float) else f"{x!s:>12}" for x in row.values())
        print("  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", type=int)
    options = parser.parse_args()
    if options.memory:
        print(measure_memory(options.memory))
        return
    torch.set_num_threads(THREADS)
    slow = {"tvm default": tvm_default}
    speed = compare("causal 1024", shapes_of(1024, 1024), options.rounds, slow)
    speed += compare("causal 128", shapes_of(128, 128, HEADS), options.rounds, {})
    for keys in DECODE_KEYS:
        speed += compare(f"decode {keys}", shapes_of(1, keys), options.rounds, {})
    memory = memory_table()
    print(figures.heading())
    print(f"H={HEADS} G={KV_HEADS} D={WIDTH}")
    show(speed)
    show(memory)
    figures.write(options.json, speed=speed, memory=memory)


if __name__ == "__main__":
    main()
