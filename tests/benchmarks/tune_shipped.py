"""Tune the kernels that ship with a record, on this CPU, and add them to the database.

    python tests/benchmarks/tune_shipped.py WORK_DIR [--trials 40] [--only N=4096]

The layers are those of Gemma 3 270M, as `make demo` builds it, and of `bench_int4.py`. Wants a
quiet machine; goes on where it was killed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvm import relax, tirx
from tvm.ir import IRModule

import sits_tvm
from sits_tvm import Config, QuantSpec, parse_target
from tir_schedules.records.database import SHIPPED, arch_of, read_records, write_records

GEMMA = ((640, 1024), (2048, 640), (640, 2048))
QUERIES_KEYS_VALUES = {"int8": ((1536, 640),), None: ((1024, 640), (256, 640))}
"""Of Gemma: with INT8 activations they are one product."""
BENCHMARK = ((2048, 640), (640, 2048), (4096, 4096), (14336, 4096))
LAYERS = [
    (*layer, activation)
    for activation in ("int8", None)
    for layer in (
        *((n, k, 32, True) for n, k in BENCHMARK),
        *((n, k, 32, False) for n, k in (*QUERIES_KEYS_VALUES[activation], *GEMMA)),
        *((n, k, 128, True) for n, k in BENCHMARK[2:]),
    )
]
"""n, k, group size, symmetric, activation."""
TARGET = "llvm -mcpu=native"


def linear(n: int, k: int) -> IRModule:
    """main(x (s, k), w (n, k)): a product for any number of rows."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tirx.Var("s", "int64"), k), "float32"))
    w = relax.Var("w", relax.TensorType((n, k), "float32"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(x, relax.op.permute_dims(w)))
        builder.emit_func_output(y)
    return builder.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--only", default="", help="part of a layer's name")
    args = parser.parse_args()
    arch = arch_of(parse_target(TARGET))
    for n, k, group_size, symmetric, activation in LAYERS:
        name = f"N={n} K={k} g{group_size} {'sym' if symmetric else 'asym'} {activation}"
        if args.only not in name:
            continue
        quant = QuantSpec(group_size=group_size, symmetric=symmetric, activation=activation)
        database = sits_tvm.tune(
            linear(n, k),
            TARGET,
            config=Config(quant=quant),
            trials=args.trials,
            work_dir=args.work_dir,
        )
        merged = {**read_records(SHIPPED, arch), **read_records(database, arch)}
        write_records(SHIPPED, arch, merged.values())


if __name__ == "__main__":
    main()
