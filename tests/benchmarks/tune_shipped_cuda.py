"""Rank the CUDA kernels that ship with a record, on no GPU, and add them to the database.

    python tests/benchmarks/tune_shipped_cuda.py WORK_DIR [--trials 8] [--arch sm_90] [--only int8]

The layers are those of Llama 3 8B and 70B and of Gemma 3 270M. Where the machine code of sm_90a is
that of sm_90, so are its records. Goes on where it was killed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvm import relax, tirx
from tvm.ir import IRModule

import sits_tvm
from sits_tvm import Config, QuantSpec, parse_target
from sits_tvm.device_code import require_toolkit
from sits_tvm.driver import unscheduled
from sits_tvm.tuning.static_code import compile_kernels, lower_candidate
from sits_tvm.tuning.tasks import find_tasks
from tir_schedules.tuning_records import SHIPPED, read_records, write_records

LLAMA_8B = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
GEMMA = ((1024, 640), (256, 640), (640, 1024), (2048, 640), (640, 2048))
STACKED = ((6144, 4096), (28672, 4096))
"""Of Llama 3 8B: queries, keys and values; gate and up."""
LLAMA_70B = ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672))
LAYERS = [
    *((n, k, 128, True, None) for n, k in (*LLAMA_8B, *GEMMA, *STACKED)),
    *((n, k, 32, False, None) for n, k in GEMMA),
    *((n, k, 128, True, "int8") for n, k in LLAMA_8B),
    *((n, k, 128, True, None) for n, k in LLAMA_70B),
]
"""n, k, group size, symmetric, activation: the most used first."""

SAME = {"sm_90": "sm_90a"}
"""Architectures that have the same machine code, unless that of the first layer differs."""


def linear(n: int, k: int) -> IRModule:
    """main(x (s, k), w (n, k)): a product for any number of rows."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tirx.Var("s", "int64"), k), "float16"))
    w = relax.Var("w", relax.TensorType((n, k), "float16"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(x, relax.op.permute_dims(w)))
        builder.emit_func_output(y)
    return builder.get()


def machine_code(mod: IRModule, arch: str, config: Config) -> list[list[str]]:
    """Of the default kernels of a module, for one and for most rows."""
    found = []
    tasks = find_tasks(*unscheduled(mod, f"cuda -arch={arch}", config=config))
    for task in (tasks[0], tasks[-1]):
        values = task.space.default_values
        work = task.rule.work(task.func, task.target)(task.space.default)
        source = lower_candidate(task, values, work).source
        for kernel in compile_kernels(source, arch, require_toolkit()):
            found.append([f"{line.opcode} {line.operands}" for line in kernel.code])
    return found


def is_same(mod: IRModule, arch: str, config: Config) -> bool:
    return machine_code(mod, arch, config) == machine_code(mod, SAME[arch], config)


def ship(database: Path, arch: str, archs: list[str]) -> None:
    """Add the records of an architecture to the shipped ones of all `archs`."""
    for to in archs:
        merged = {**read_records(SHIPPED, to), **read_records(database, arch)}
        write_records(SHIPPED, to, merged.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--arch", default="sm_90,sm_80")
    parser.add_argument("--only", default="", help="part of a layer's name")
    args = parser.parse_args()
    for arch in args.arch.split(","):
        parse_target(f"cuda -arch={arch}")
        archs = [arch]
        for n, k, group_size, symmetric, activation in LAYERS:
            name = f"N={n} K={k} g{group_size} {'sym' if symmetric else 'asym'} {activation}"
            if args.only not in name:
                continue
            quant = QuantSpec(group_size=group_size, symmetric=symmetric, activation=activation)
            config = Config(quant=quant)
            mod = linear(n, k)
            if arch in SAME and len(archs) == 1 and is_same(mod, arch, config):
                archs.append(SAME[arch])
            database = sits_tvm.tune(
                mod,
                f"cuda -arch={arch}",
                config=config,
                runner="static",
                trials=args.trials,
                work_dir=args.work_dir,
            )
            ship(database, arch, archs)


if __name__ == "__main__":
    main()
