"""What the static model says of the cases of a bundle, and what records of it have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm.target import Target

from sits_tvm.device_code import Launch, require_toolkit
from sits_tvm.tuning.static_code import Candidate, compile_kernels
from sits_tvm.tuning.static_code import estimates as of_kernels
from sits_tvm.tuning.static_constants import MODEL_VERSION, device_of
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.matmul_cuda.tile import Tile
from tir_schedules.records.database import FORMAT
from tir_schedules.records.workloads import MatmulWorkload

_RUNS = 13
"""Of each product in a timing: one, one more in a graph, and that graph eleven times."""

_SLOWER = 5
"""Than estimated, at most; what torch takes counts as ours."""

_EACH, _ROTATED, _CHECK = 0.5, 256 << 20, 3.0
"""Seconds beside the products of a timing, bytes of weights that it walks through, seconds of a
check."""


def record_of(target: Target) -> dict[str, Any]:
    """Fields of the records that a run writes."""
    device = device_of(str(target.attrs["arch"]))
    return {
        "format": FORMAT,
        "tvm": str(tvm.__version__),
        "model": MODEL_VERSION,
        "device": device.name,
    }


def estimates(
    case: dict[str, Any], source: str, target: Target, rows: Sequence[int]
) -> dict[str, float | None]:
    """Seconds at least by number of rows; None where the work of a kernel is not known."""
    arch = str(target.attrs["arch"])
    kernels = {kernel.name: kernel for kernel in compile_kernels(source, arch, require_toolkit())}
    found: dict[str, float | None] = {}
    for count in rows:
        bucket = next(b for b in case["buckets"] if b["most"] is None or count <= b["most"])
        rule, workload = TensorCoreMatmul(), MatmulWorkload(**case["workload"])
        func = rule.prim_func(workload, count)
        work = rule.work(func, target)(Tile(**bucket["tile"]))
        if isinstance(work, str):
            found[str(count)] = None
            continue
        launches = {one["name"]: _launch(one, count) for one in bucket["kernels"]}
        candidate = Candidate({}, work, source, launches)
        used = [kernels[name] for name in launches]
        device = device_of(arch)
        found[str(count)] = sum(one.seconds for one in of_kernels(candidate, used, device))
    return found


def _launch(kernel: dict[str, Any], rows: int) -> Launch:
    """With the extents of so many rows."""
    grid = tuple(str(eval(text, {"__builtins__": {}}, {"m": rows})) for text in kernel["grid"])
    return Launch(grid, kernel["block"], kernel["static_smem"], kernel["dynamic_smem"])


def seconds_at_most(manifest: dict[str, Any]) -> float:
    """Of a run on the device that the estimates are of. The runner starts no timing after 400 s,
    whatever this says."""
    seconds = 0.0
    for case in manifest["cases"]:
        size = case["n"] * case["k"] / 2
        copies = max(2, -(-_ROTATED // size))
        each = [one or 0.0 for one in case["estimates"].values()]
        seconds += _CHECK + sum(_EACH + 2 * _RUNS * copies * _SLOWER * one for one in each)
    return seconds
