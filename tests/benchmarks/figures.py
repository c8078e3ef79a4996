"""Figures of the benchmarks: each writes a JSON file; README's tables are made of some of them.

    PYTHONPATH=. python tests/benchmarks/figures.py [FOLDER]

prints those tables. `make bench` leaves its files in build/figures; README is of those in the
folder `figures` beside this file, one run of `make bench` on one machine, and a test compares.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import tvm

COMMITTED = Path(__file__).parent / "figures"
PACKAGES = ("apache-tvm", "torch", "onnxruntime", "numpy")
NEAREST = {"W4A16": "ort level 0", "W4A8": "ort level 4"}
"""MatMulNBits that computes as our kernel does: with float32 or with int8 activations."""


def machine() -> dict[str, Any]:
    return {
        "cpu": tvm.get_global_func("target.llvm_get_system_cpu")(),
        "threads": os.environ.get("TVM_NUM_THREADS", "default"),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
    }


def heading() -> str:
    return ", ".join(f"{key} {value}" for key, value in machine().items())


def write(path: Path | None, **figures: Any) -> None:
    """The figures, and the machine that they are of, where a file is asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")


def tables(folder: Path) -> Iterator[str]:
    """Of INT4 products, a model and attention, in Markdown; ratios: a peer's time over ours."""
    yield markdown(_products(read(folder, "int4")["rows"]))
    yield markdown(_models(read(folder, "int4_model")["rows"]))
    yield markdown(_attention(read(folder, "attention")["speed"]))


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def markdown(rows: Iterable[dict[str, str]]) -> str:
    rows = list(rows)
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _products(rows: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    for row in rows:
        if row["k"] == 4096 and row["case"].endswith("g32") and row["kernel"] in NEAREST:
            yield {
                "float32 tokens x INT4 weights": f"{row['m']} x {row['k']} x {row['n']}",
                "kernel": row["kernel"],
                "ms": f"{row['us'] / 1000:.2f}",
                "MatMulNBits of ONNX Runtime": f"{row['x ' + NEAREST[row['kernel']]]:.1f}x",
                "float32 of PyTorch": f"{row['x torch fp32']:.1f}x",
            }


def _models(rows: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    for row in rows:
        yield {
            "Gemma 3 270M": row["model"],
            "MB": f"{row['MB']:.0f}",
            **{
                f"{task}, {unit}": f"{row[f'{task} tokens/s']:.0f}"
                for task, unit in (("prefill", "tokens/s"), ("decode", "tokens/s"))
            },
        }


def _attention(rows: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["kernel"]: row for row in rows if row["case"] == case}
        yield {
            "attention": case,
            "ms": f"{found['fused']['ms']:.2f}",
            "PyTorch's": f"{found['torch']['over fused']:.1f}x",
            "matmuls and softmax": f"{found['plain ops']['over fused']:.1f}x",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=COMMITTED)
    print("\n".join(tables(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
