"""What generality costs our INT4 products: other forms of one product, alternated in one run.

    PYTHONPATH=. python tests/benchmarks/bench_int4_variants.py [--rounds 15] [--json F]

The base is symmetric, with a static number of rows and with shapes that tiles divide. "cost" is the
median over rounds of the time of a form over that of the base, for each weight of the product;
"others" is the share of the CPU that other processes used.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from sits_tvm.config import QuantSpec
from tests.benchmarks import figures
from tests.benchmarks.bench_int4 import OURS, checked, median, render, rotated
from tests.benchmarks.int4_case import Case, Kernel
from tests.benchmarks.rounds import OtherLoad, alternate

BASE = "base"
SYMMETRIC = QuantSpec(group_size=32)
ASYMMETRIC = replace(SYMMETRIC, symmetric=False)
WIDTH, TAIL = 4096, 4096 - 19
ROWS = (1, 8, 512)
COLUMNS = {
    "kernel": "{}",
    "rows": "{}",
    "form": "{}",
    "us": "{:.0f}",
    "cost": "{:.2f}",
    "others": "{:.0%}",
}


def forms(m: int, build: Any) -> dict[str, tuple[Case, Kernel]]:
    base, asymmetric = (rotated(m, WIDTH, WIDTH, spec) for spec in (SYMMETRIC, ASYMMETRIC))
    tails = rotated(m, TAIL, TAIL, SYMMETRIC)
    return {
        BASE: (base, build(base, m)),
        "symbolic rows": (base, build(base)),
        "asymmetric": (asymmetric, build(asymmetric, m)),
        f"K=N={TAIL}": (tails, build(tails, m)),
    }


def measure(name: str, m: int, rounds: int) -> list[dict[str, Any]]:
    found = forms(m, OURS[name])
    for form, (case, kernel) in found.items():
        checked(case, f"{name}, {form}", kernel)
    with OtherLoad() as others:
        seconds = alternate({form: kernel.run for form, (_, kernel) in found.items()}, rounds)
    flop = {form: seconds[form] / case.flops for form, (case, _) in found.items()}
    return [
        {
            "kernel": name,
            "rows": m,
            "form": form,
            "us": 1e6 * median(seconds[form]) / case.layers,
            "cost": median(flop[form] / flop[BASE]),
            "others": others.share,
        }
        for form, (case, _) in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(figures.heading())
    rows = [row for name in OURS for m in ROWS for row in measure(name, m, options.rounds)]
    print(render(rows, COLUMNS))
    figures.write(options.json, rows=rows)


if __name__ == "__main__":
    main()
