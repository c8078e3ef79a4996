"""Rank the CUDA kernels that ship with a record, on no GPU, and write the database.

    python tests/benchmarks/tune_shipped_cuda.py WORK_DIR [--trials 16] [--arch sm_90] [--only 640]

The layers are those of Llama 3 8B and 70B and of Gemma 3 270M. Goes on where it was killed; another
version of the kernels or of the model starts anew. Where the default wins, or ties, a record names
no parameters. Candidates are compiled for one number of rows: those that spill in a build for any
number are then to be left out, see `test_shipped_cuda`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from sits_tvm import parse_target
from sits_tvm.tuning.static_constants import device_of
from sits_tvm.tuning.tasks import Task
from sits_tvm.tuning.trials import TrialLog
from tests.benchmarks.shared_code import SharedRun
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.records.database import SHIPPED, read_records, write_records
from tir_schedules.records.workloads import MATMULS, MatmulWorkload
from tir_schedules.sources import digest

ARCHS = ("sm_80", "sm_90", "sm_90a")
LLAMA_8B = ((4096, 4096), (1024, 4096), (6144, 4096), (28672, 4096), (14336, 4096), (4096, 14336))
"""n, k: queries and output; keys and values; all three; gate and up; each of them; down."""
LLAMA_70B = ((8192, 8192), (1024, 8192), (10240, 8192), (57344, 8192), (28672, 8192), (8192, 28672))
GEMMA = ((1024, 640), (256, 640), (640, 1024), (2048, 640), (640, 2048))
FORMS = (
    (LLAMA_8B, 128, True, None),
    (GEMMA, 128, True, None),
    (LLAMA_70B, 128, True, None),
)
"""Shapes, group size, symmetric, activation: the most used first."""
DRAWN = 256


def workloads() -> list[MatmulWorkload]:
    """Of float16 models."""
    return [
        MatmulWorkload(
            MATMULS[activation == "int8"],
            n,
            k,
            group_size,
            symmetric,
            "float16",
            activation or "float16",
        )
        for shapes, group_size, symmetric, activation in FORMS
        for n, k in shapes
    ]


def tasks_of(workload: MatmulWorkload, arch: str) -> list[Task]:
    """One for each range of rows."""
    rule, target = TensorCoreMatmul(), parse_target(f"cuda -arch={arch}")
    spaces = rule.spaces(rule.prim_func(workload, None), target)
    return [Task(rule, workload, bucket, space, target) for bucket, space in spaces.items()]


def run_of(work_dir: Path, trials: int, arch: str) -> SharedRun:
    work_dir.mkdir(parents=True, exist_ok=True)
    device = device_of(arch)
    return SharedRun(
        runner="static",
        device=str(device),
        trials=trials,
        time_budget=None,
        log=TrialLog(work_dir / "trials.jsonl"),
        database=work_dir / f"database-{digest(TensorCoreMatmul.__module__)}",
        progress=lambda line: print(line, flush=True),
        modelled=device,
        drawn=DRAWN,
    )


def ship(database: Path, arch: str, tasks: list[Task]) -> None:
    """Write the records of these tasks, and no others, as those of the architecture."""
    found, records = read_records(database, arch), []
    for task in tasks:
        record = found.get((task.workload, task.bucket))
        if record is not None:
            is_default = record.parameters == task.space.default_values
            records.append(replace(record, parameters={}) if is_default else record)
    write_records(SHIPPED, arch, records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--arch", default=",".join(ARCHS))
    parser.add_argument("--only", default="", help="part of a kernel's name; nothing is shipped")
    args = parser.parse_args()
    archs = args.arch.split(",")
    runs = {arch: run_of(args.work_dir, args.trials, arch) for arch in archs}
    known = runs[archs[0]].known
    for run in runs.values():
        run.known = known
    chosen = [workload for workload in workloads() if args.only in str(workload)]
    for workload in chosen:
        for arch in archs:
            runs[arch].all(tasks_of(workload, arch))
    for arch in archs if not args.only else ():
        ship(runs[arch].database, arch, [t for w in chosen for t in tasks_of(w, arch)])


if __name__ == "__main__":
    main()
