"""Float32 matrix products on this CPU: ours against torch, alternated in one run.

    PYTHONPATH=. python tests/benchmarks/bench_kernels.py [--rounds 7] [--json F]

The ratio is torch's median time over ours: above 1 we are faster. For one row the weights rotate
over 12 layers, which caches do not hold. `bench_int4` has the INT4 products.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import tvm
from tvm import te, tirx

from tests.benchmarks import figures
from tests.benchmarks.rounds import alternate
from tir_schedules.matmul_cpu.rule import Matmul

THREADS = int(os.environ.setdefault("TVM_NUM_THREADS", "2"))
CPU = tvm.get_global_func("target.llvm_get_system_cpu")()
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": CPU, "num-cores": THREADS})
GEMM_SHAPES = ((640, 2048), (2048, 640), (640, 1024), (4096, 4096))
ROWS, LAYERS, HIDDEN = 512, 12, 4096


def build(func: tirx.PrimFunc) -> Callable[..., None]:
    scheduled = Matmul().apply(func, TARGET, False)
    return tvm.compile(scheduled.mod, target=TARGET)["main"]


def linear(n: int, k: int) -> tirx.PrimFunc:
    """x (m, k) @ w (n, k).T with symbolic m."""
    n, k = (tirx.IntImm("int64", extent) for extent in (n, k))
    x = te.placeholder((te.var("m", "int64"), k), name="x")
    w = te.placeholder((n, k), name="w")
    r = te.reduce_axis((0, k), name="r")
    y = te.compute((x.shape[0], n), lambda i, j: te.sum(x[i, r] * w[j, r], axis=r), name="y")
    return te.create_prim_func([x, w, y]).with_attr("tirx.noalias", True)


def batched(heads: int, m: int, n: int, k: int, *, transposed: bool) -> tirx.PrimFunc:
    """Scores (keys in rows of k) or the product with values (rows of n)."""
    heads, m, n, k = (tirx.IntImm("int64", extent) for extent in (heads, m, n, k))
    a = te.placeholder((heads, m, k), name="a")
    b = te.placeholder((heads, n, k) if transposed else (heads, k, n), name="b")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute(
        (heads, m, n),
        lambda h, i, j: te.sum(a[h, i, r] * (b[h, j, r] if transposed else b[h, r, j]), axis=r),
        name="c",
    )
    return te.create_prim_func([a, b, c]).with_attr("tirx.noalias", True)


def compare(
    case: str, runs: dict[str, Callable[[], object]], rounds: int, flops: float, layers: int = 1
) -> list[dict]:
    times = alternate(runs, rounds, peers={"torch"})
    seconds = {name: float(np.median(s)) for name, s in times.items()}
    return [
        {
            "case": case,
            "kernel": name,
            "us": 1e6 * value / layers,
            "gflops": flops * layers / value / 1e9,
            "x torch": seconds["torch"] / value,
        }
        for name, value in seconds.items()
    ]


def bench_gemm(rng: np.random.Generator, rounds: int) -> list[dict]:
    table = []
    for k, n in GEMM_SHAPES:
        x, w = (rng.standard_normal(s, "float32") for s in ((ROWS, k), (n, k)))
        kernel, args = build(linear(n, k)), [*_tensors(x, w), _empty(ROWS, n)]
        tx, tw = torch.tensor(x), torch.tensor(w)
        runs = {
            "torch": lambda tx=tx, tw=tw: torch.nn.functional.linear(tx, tw),
            "float32": lambda kernel=kernel, args=args: kernel(*args),
        }
        table += compare(f"M={ROWS} K={k} N={n}", runs, rounds, 2 * ROWS * k * n)
    return table


def bench_gemv(rng: np.random.Generator, rounds: int) -> list[dict]:
    k = n = HIDDEN
    x, y = rng.standard_normal((1, k), "float32"), _empty(1, n)
    weights = [rng.standard_normal((n, k), "float32") for _ in range(LAYERS)]
    tx, tw = torch.tensor(x), [torch.tensor(w) for w in weights]
    kernel, layers = build(linear(n, k)), [_tensors(x, w) for w in weights]
    runs = {
        "torch": lambda: [torch.nn.functional.linear(tx, w) for w in tw],
        "float32": lambda: [kernel(*layer, y) for layer in layers],
    }
    return compare(f"M=1 K={k} N={n}", runs, rounds, 2 * k * n, LAYERS)


def bench_attention(rng: np.random.Generator, rounds: int) -> list[dict]:
    heads, length, dim = 4, 512, 256
    table = []
    for case, n, k, transposed in (("q k^T", length, dim, True), ("p v", dim, length, False)):
        a = rng.standard_normal((heads, length, k), "float32")
        b = rng.standard_normal((heads, n, k) if transposed else (heads, k, n), "float32")
        ta, tb = torch.tensor(a), torch.tensor(b)
        tb = tb.transpose(1, 2) if transposed else tb
        kernel = build(batched(heads, length, n, k, transposed=transposed))
        inputs, y = _tensors(a, b), _empty(heads, length, n)
        runs = {
            "torch": lambda ta=ta, tb=tb: torch.matmul(ta, tb),
            "float32": lambda kernel=kernel, inputs=inputs, y=y: kernel(*inputs, y),
        }
        name = f"{case}, {heads} heads, {length}x{n}x{k}"
        table += compare(name, runs, rounds, 2 * heads * length * n * k)
    return table


def _tensors(*arrays: np.ndarray) -> list:
    return [tvm.runtime.tensor(array) for array in arrays]


def _empty(*shape: int) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.zeros(shape, "float32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    rng = np.random.default_rng(0)
    table = [
        row
        for bench in (bench_gemm, bench_gemv, bench_attention)
        for row in bench(rng, options.rounds)
    ]
    print(figures.heading())
    print(f"{'case':32} {'kernel':20} {'us':>9} {'GFLOP/s':>8} {'x torch':>8}")
    for row in table:
        print(
            f"{row['case']:32} {row['kernel']:20} {row['us']:9.0f} {row['gflops']:8.0f} "
            f"{row['x torch']:8.2f}"
        )
    figures.write(options.json, kernels=table)


if __name__ == "__main__":
    main()
