"""INT4 matrix products on this CPU: ours against named peers and the limits of the machine.

    PYTHONPATH=. python tests/benchmarks/bench_int4.py [--only M=1 g32] [--json F] [--plot F]

Every kernel of a case is timed once per round, and "x peer" is the median over rounds of the peer's
time over ours: above 1 we are faster. "of read" is the bandwidth at which a kernel reads its
weights, over the best of three kernels that only read the same tensors; "of peak" is its arithmetic
over that of its instruction alone. Up to 32 rows the weights rotate over layers that caches do not
hold. "error" is the relative L2 distance from float64. Where others use much of the CPU, figures
mean little. --only takes those of our kernels and cases whose names have all of these words.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm

from sits_tvm.config import QuantSpec
from sits_tvm.report_tables import render_table
from tests.benchmarks import cpu_limits, figures
from tests.benchmarks.int4_case import TOLERANCE, Case, Kernel, NotMeasured
from tests.benchmarks.int4_ours import TARGET, THREADS, tvm_default_kernel, w4_bfloat16, w4a8, w4a16
from tests.benchmarks.int4_peers import onnxruntime_kernel, torch_kernel
from tests.benchmarks.int4_plot import plot
from tests.benchmarks.llama_cpp_peer import llama_cpp_kernel
from tests.benchmarks.rounds import OtherLoad, alternate

ROTATED = 112 << 20  # bytes of INT4 codes: several times the last-level cache
FEW_ROWS = 32  # up to these the weights rotate: reading them takes most of the time

Build = Callable[..., Kernel]


OURS: dict[str, Build] = {"W4A16": w4a16, "W4-bf16": w4_bfloat16, "W4A8": w4a8}
PEERS: dict[str, Build] = {
    "ort level 0": lambda case: onnxruntime_kernel(case, 0),
    "ort level 4": lambda case: onnxruntime_kernel(case, 4),
    "torch fp32": lambda case: torch_kernel(case, torch.float32),
    "torch bf16": lambda case: torch_kernel(case, torch.bfloat16),
    "llama.cpp Q4_0": llama_cpp_kernel,
    "TVM default": tvm_default_kernel,
}
ONCE = {"TVM default"}
"""Hundreds of times slower than the others."""


def cases() -> Iterator[Case]:
    g32, g128 = QuantSpec(group_size=32), QuantSpec(group_size=128)
    for m in (1, 512):
        for k, n in ((4096, 4096), (4096, 14336)):
            for spec in (g32, g128):
                yield rotated(m, n, k, spec)
    for m in (2, 4, 8, 16, 32):
        yield rotated(m, 4096, 4096, g32)
    for m in (1, 512):
        for k, n in ((640, 2048), (2048, 640)):
            yield rotated(m, n, k, g32)


def rotated(m: int, n: int, k: int, spec: QuantSpec) -> Case:
    layers = -(-ROTATED // (n * k // 2)) if m <= FEW_ROWS else 1
    return Case(m, n, k, spec, layers, THREADS)


def measure(case: Case, ours: dict[str, Build], rounds: int) -> list[dict[str, Any]]:
    """A row for each limit and each kernel; results are compared before anything is timed."""
    kernels: dict[str, Kernel] = {}
    rows: list[dict[str, Any]] = []
    for name, build in (ours | PEERS).items():
        try:
            kernels[name] = build(case)
        except NotMeasured as reason:
            rows.append({"kernel": name, "skipped": str(reason)})
    errors = {name: checked(case, name, kernel) for name, kernel in kernels.items()}

    codes = kernels[next(iter(ours))].codes
    reads = cpu_limits.reads(codes, TARGET) if case.m <= FEW_ROWS else {}
    instructions = {kernels[name].peak for name in ours} if case.m > 1 else set()
    peaks = {name: cpu_limits.peak(name, TARGET) for name in sorted(instructions)}
    peaks = {name: peak for name, peak in peaks.items() if peak is not None}

    runs = reads | {name: peak.run for name, peak in peaks.items()}
    runs |= {name: kernel.run for name, kernel in kernels.items()}
    with OtherLoad() as others:
        seconds = alternate(runs, rounds, peers=PEERS, once=ONCE)

    read = np.max([nbytes(codes) / seconds[name] for name in reads], axis=0, initial=0)
    arithmetic = {name: peak.operations / seconds[name] for name, peak in peaks.items()}
    rows += [{"kernel": name, "GFLOP/s": median(rate) / 1e9} for name, rate in arithmetic.items()]
    if reads:
        rows.append({"kernel": "read", "GB/s": median(read) / 1e9})
    for name, kernel in kernels.items():
        bandwidth = case.layers * kernel.nbytes / seconds[name]
        rate = case.flops / seconds[name]
        row = {
            "kernel": name,
            "us": 1e6 * median(seconds[name]) / case.layers,
            "least us": 1e6 * float(np.nanmin(seconds[name])) / case.layers,
            "GB/s": median(bandwidth) / 1e9,
            "GFLOP/s": median(rate) / 1e9,
            "error": errors[name],
        }
        if reads:
            row["of read"] = median(bandwidth / read)
        if kernel.peak in arithmetic:
            row["of peak"] = median(rate / arithmetic[kernel.peak])
        if name in ours:
            peers = [peer for peer in PEERS if peer in kernels]
            row |= {f"x {peer}": median(seconds[peer] / seconds[name]) for peer in peers}
        rows.append(row)
    shared = {"case": case.name, "m": case.m, "n": case.n, "k": case.k, "layers": case.layers}
    return [shared | {"others": others.share} | row for row in rows]


def checked(case: Case, name: str, kernel: Kernel) -> float:
    kernel.run()
    error, limit = case.error(kernel.result()), TOLERANCE[kernel.rounds_to]
    if not error <= limit:
        raise SystemExit(f"{case.name}, {name}: relative error {error:.1e}, limit {limit:.0e}")
    return error


def median(values: np.ndarray) -> float:
    return float(np.nanmedian(values))


def nbytes(tensors: Sequence[tvm.runtime.Tensor]) -> int:
    return sum(tensor.numpy().nbytes for tensor in tensors)


def chosen(words: list[str]) -> Iterator[tuple[Case, dict[str, Build]]]:
    for case in cases():
        names = {name: {*case.name.split(), name} for name in OURS}
        ours = {name: OURS[name] for name in OURS if names[name].issuperset(words)}
        if ours:
            yield case, ours


COLUMNS = {
    "kernel": "{}",
    "us": "{:.0f}",
    "least us": "{:.0f}",
    "GB/s": "{:.1f}",
    "GFLOP/s": "{:.0f}",
    "of read": "{:.2f}",
    "of peak": "{:.2f}",
    "error": "{:.0e}",
}


def table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    lines = [
        f"{first['case']}, layers: {first['layers']}, CPU used by others: {first['others']:.0%}"
    ]
    lines.append(render([row for row in rows if "skipped" not in row], COLUMNS))
    lines += [f"{row['kernel']}: {row['skipped']}" for row in rows if "skipped" in row]
    return "\n".join(lines)


def render(rows: list[dict[str, Any]], formats: dict[str, str]) -> str:
    """A table of the keys in `formats`, and of all ratios: they have "x " in their names."""
    found = dict.fromkeys(key for row in rows for key in row)
    columns = {key: form for key, form in formats.items() if key in found}
    columns |= {key: "{:.2f}" for key in found if "x " in key}
    cells = [
        [form.format(row[key]) if key in row else "" for key, form in columns.items()]
        for row in rows
    ]
    return render_table(list(columns), cells)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    print(figures.heading())
    rows: list[dict[str, Any]] = []
    for case, ours in chosen(options.only):
        found = measure(case, ours, options.rounds)
        gc.collect()  # TVMScript keeps the frames it was called from, with their tensors, in cycles
        print("\n" + table(found), flush=True)
        rows += found
    if not rows:
        parser.error(f"no case and kernel has all of: {' '.join(options.only)}")
    figures.write(options.json, rows=rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
