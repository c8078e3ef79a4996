"""What quantization-aware training recovers of the loss that rounding costs, on this CPU.

    PYTHONPATH=. python tests/benchmarks/bench_qat.py [--seeds 3] [--json F]

Two models in Relax, trained from scratch: a character-level transformer (2 layers, width 64, 64
characters of Python's own documentation) and an MLP on scikit-learn's digits. From one float32
checkpoint go on, with the same batches, steps and learning rates: float32, and training with
W4 and W3 fake quantization in groups of 32. Rows are cross entropy on held-out data of what is
deployed: float32; the float32 weights rounded to nearest ("absmax", and "mse", which picks the
scales with the least squared error); the trained ones, with learned and with absmax scales.
Recovered: (rounded - trained) / (rounded - float32), of sums over the seeds, against absmax.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from sits_tvm import Config, QuantSpec, convert_qat, prepare_qat
from tests import qat_training as training
from tests.benchmarks import figures

Batches = Iterator[tuple[np.ndarray, np.ndarray]]
METHODS = ("learned", "absmax")


@dataclass(frozen=True)
class Task:
    """A model, batches of training data by seed, held-out batches, and how long to train."""

    name: str
    model: training.Model
    batches: Callable[[int], Batches]
    held_out: list[tuple[np.ndarray, np.ndarray]]
    steps: int
    more_steps: int
    rates: tuple[float, float]  # at the start of each phase


def characters() -> Task:
    from pydoc_data.topics import topics

    text = "".join(topics[key] for key in sorted(topics))
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    data = np.array([numbers[character] for character in text])
    length, batch = 64, 16

    def batches(data: np.ndarray, seed: int) -> Batches:
        rng = np.random.default_rng(seed)
        while True:
            starts = rng.integers(0, len(data) - length - 1, batch)
            rows = data[starts[:, None] + np.arange(length + 1)]
            yield np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:].ravel())

    held_out = batches(data[-40_000:], 0)
    return Task(
        "transformer",
        training.transformer(len(numbers), 64, 2, 4, length, batch),
        lambda seed: batches(data[:-40_000], seed),
        [next(held_out) for _ in range(32)],
        steps=800,
        more_steps=300,
        rates=(3e-3, 1e-3),
    )


def digits() -> Task:
    x, labels = training.digits()
    held_out = [(x[i : i + 128], labels[i : i + 128]) for i in range(1408, 1792, 128)]

    def batches(seed: int) -> Batches:
        rng = np.random.default_rng(seed)
        while True:
            picked = rng.integers(0, 1408, 128)
            yield x[picked], labels[picked]

    model = training.mlp((64, 64, 32, 10), 128)
    return Task("digits", model, batches, held_out, steps=150, more_steps=150, rates=(1e-2, 3e-3))


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "transformer": characters}


class Runner:
    """Trains and scores one task; compiled steps are kept for the next seed."""

    def __init__(self, task: Task) -> None:
        self.task, self.steps = task, {}

    def seed(self, seed: int) -> dict:
        task = self.task
        rng = np.random.default_rng(seed)
        params = task.model.initial(rng)
        self.train(task.model.mod, params, 2 * seed, task.steps, task.rates, "float32")
        row: dict = {"task": task.name, "seed": seed}
        trained = {bits: self.quantization_aware(params, seed, bits) for bits in (4, 3)}
        self.train(
            task.model.mod, params, 2 * seed + 1, task.more_steps, (task.rates[1], 0), "float32"
        )
        row["float32"] = self.loss(task.model.mod, params)
        for bits, losses in trained.items():
            row[f"W{bits}"] = {**self.rounded(params, bits), **losses}
        return row

    def rounded(self, params: training.Params, bits: int) -> dict[str, float]:
        losses = {}
        for name, method in (("rounded", "absmax"), ("rounded, mse", "mse")):
            spec = QuantSpec(bits=bits, group_size=32, scale_method=method)
            config = Config(quant=spec, quantize_head=True)
            losses[name] = self.loss(self.task.model.mod, params, config)
        return losses

    def quantization_aware(self, params: training.Params, seed: int, bits: int) -> dict[str, float]:
        task, spec, losses = self.task, QuantSpec(bits=bits, group_size=32), {}
        for scales in METHODS:
            mod, start = prepare_qat(
                task.model.mod, spec, params=params, scales=scales, quantize_head=True
            )
            values = training.copied(start)
            rates = (task.rates[1], 0)
            key = f"W{bits} {scales}"
            self.train(mod, values, 2 * seed + 1, task.more_steps, rates, key)
            losses[scales] = self.loss(*convert_qat(mod, values, spec))
        return losses

    def train(self, mod, params, seed, steps, rates, key) -> None:
        start = time.perf_counter()
        model = self.task.model
        if key not in self.steps:
            self.steps[key] = training.gradient_function(mod, model.rows, model.classes, params)
        first, last = rates

        def rate(progress: float, name: str) -> float:
            slower = 0.1 if name.endswith(".scale") else 1
            return slower * (first + (last - first) * progress)

        training.adam(params, self.steps[key], self.task.batches(seed), rate, steps)
        seconds = time.perf_counter() - start
        print(f"{self.task.name} {key}: {steps} steps, {seconds:.0f} s", file=sys.stderr)

    def loss(self, mod, params, config: Config | None = None) -> float:
        logits = training.logits_of(mod, params, config)
        return mean(training.cross_entropy(logits(x), y) for x, y in self.task.held_out)


def show(rows: list[dict]) -> None:
    header = ["task", "seed", "bits", "float32", "rounded", "mse", "learned", "absmax"]
    print(" ".join(f"{cell:>11}" for cell in header))
    for row in rows:
        for bits in ("W4", "W3"):
            losses = [row["float32"], *row[bits].values()]
            cells = [row["task"], str(row["seed"]), bits, *(f"{loss:.4f}" for loss in losses)]
            print(" ".join(f"{cell:>11}" for cell in cells))
    for task in dict.fromkeys(row["task"] for row in rows):
        for bits in ("W4", "W3"):
            found = [row for row in rows if row["task"] == task]
            shares = ", ".join(f"{m} scales {recovered(found, bits, m):.0%}" for m in METHODS)
            print(f"{task} {bits} recovered over {len(found)} seeds: {shares}")


def recovered(rows: list[dict], bits: str, method: str) -> float:
    """Of sums over seeds: for one seed the cost of rounding may be next to nothing."""
    gain = sum(row[bits]["rounded"] - row[bits][method] for row in rows)
    return gain / sum(row[bits]["rounded"] - row["float32"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runners = [Runner(TASKS[task]()) for task in options.tasks]
    rows = [runner.seed(seed) for runner in runners for seed in range(options.seeds)]
    show(rows)
    figures.write(options.json, rows=rows)


if __name__ == "__main__":
    main()
