"""Check the kernels of this folder on a GPU against float64, then time them beside torch's float16.

    python run.py [--dry] [--only NAME] [--seconds 400]

Needs torch with CUDA, numpy and the driver. `--dry` needs no GPU: it checks the files, how the
weights are unpacked, and every launch. Writes results.json, with how well the static model's order
is that of the times (Spearman), and database/, for sits_tvm's Config.database.

Times are of CUDA graphs that walk through copies of the weight of more than twice the L2 cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from launch import Case, Driver, bucket_of, evaluate, extents, outputs_of
from ranking import correlations, records, write_database
from reference import activations, drawn, expected, unpacked

HERE = Path(__file__).parent
RAGGED = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 129)
"""Numbers of rows that are checked."""
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
SUMS = 4e-6
"""Of the sum of magnitudes, how far float32 sums may be off."""
ROTATED = 256 << 20
"""Bytes of weights that a timing walks through."""
LIMITS = {"H200": (4.8e12, 990e12, 1979e12), "H100": (3.35e12, 990e12, 1979e12)}
"""Bytes, float16 and INT8 operations per second, of NVIDIA's data sheets."""


def check(manifest, case, kernels, device):
    """The largest error in units of what is allowed, over all numbers of rows."""
    generator = torch.Generator(device).manual_seed(0)
    parts, worst = drawn(case, device, generator), 0.0
    level, scale = unpacked(parts, case)
    for rows in RAGGED:
        columns = manifest["int8_columns"]
        arguments, x, x_scale = activations(case, rows, columns, device, generator)
        outputs = outputs_of(case, rows, device)
        kernels.run({**arguments, **parts, **outputs}, rows)
        if device.type == "cuda":
            torch.cuda.synchronize()
        out = outputs[case["output"]].to(torch.float64)
        value, magnitude = expected(case, level, scale, x, x_scale)
        allowed = SUMS * magnitude + 1.01 * UNIT[case["dtype"]] * value.abs() + 2.0**-24
        error = ((out - value).abs() / allowed).max().item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def timed(case, manifest, kernels, rows, device):
    """Seconds of a product, and of torch's in float16, in turns."""
    generator = torch.Generator(device).manual_seed(1)
    parts = drawn(case, device, generator)
    size = sum(part.nbytes for part in parts.values())
    copies = [
        {name: part.clone() for name, part in parts.items()}
        for _ in range(max(2, -(-ROTATED // size)))
    ]
    x, _, _ = activations(case, rows, manifest["int8_columns"], device, generator)
    outputs = outputs_of(case, rows, device)
    ours = graph_of([lambda p=p: kernels.run({**x, **p, **outputs}, rows) for p in copies])
    half = torch.randn((rows, case["k"]), device=device).half()
    weights = [
        torch.randn((case["n"], case["k"]), device=device).half()
        for _ in range(max(2, -(-ROTATED // (2 * case["n"] * case["k"]))))
    ]
    peer = graph_of([lambda w=w: torch.mm(half, w.T) for w in weights])
    seconds = {"ours": [], "torch": []}
    for _ in range(5):
        seconds["ours"].append(seconds_of(ours) / len(copies))
        seconds["torch"].append(seconds_of(peer) / len(weights))
    return {name: statistics.median(values) for name, values in seconds.items()}, size


def graph_of(calls):
    """A CUDA graph of calls, once they have run."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def seconds_of(graph):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def dry(manifest):
    """Check files, unpacking and launches on the CPU."""
    samples = np.load(HERE / "samples.npz")
    for kind in ("float", "int8"):
        names = ("codes", "scale", "zero_point")
        parts = {name: torch.tensor(samples[f"{kind}.{name}"].astype(_signed(samples, kind, name)))
                 for name in names}  # fmt: skip
        case = {
            "n": 40,
            "groups": 7,
            "padded_k": 224,
            "unit": json.loads(str(samples[f"{kind}.unit"])),
        }
        level, scale = unpacked(parts, case)
        weight = (level * scale[..., None]).flatten(1)[:, :200]
        difference = (weight - torch.tensor(samples[f"{kind}.weight"]).double()).abs().max()
        assert difference < 1e-6, f"{kind}: unpacked weights are off by {difference}"
    for case in manifest["cases"]:
        cubin = (HERE / f"{case['name']}.cubin").read_bytes()
        assert hashlib.sha256(cubin).hexdigest() == case["sha256"], f"{case['name']} has changed"
        for rows in (*RAGGED, *manifest["rows"]):
            check_launches(case, rows)
    print(f"{len(manifest['cases'])} cases: files, unpacking and launches are right")


def _signed(samples, kind, name):
    return samples[f"{kind}.{name}"].dtype.name.replace("uint", "int")


def check_launches(case, rows):
    """Blocks for all rows and channels, and arguments that there are."""
    bucket = bucket_of(case, rows)
    tile, (product, *sums) = bucket["tile"], bucket["kernels"][case["term_words"] > 0 :]
    x, y, _ = extents(product["grid"], rows)
    channels = 16 * tile["channels"] * tile["warps_n"]
    tokens = 8 * tile["tokens"] * tile["warps_m"]
    assert x == -(-case["n"] // channels) * -(-rows // tokens), f"{case['name']}: {x} blocks"
    assert y == tile["split"]
    assert bool(sums) == (tile["split"] > 1)
    known = {"X_rows", "X_scale_rows", "X_sums_rows", "partial", "buffer"}
    known |= {case["output"], *case["shapes"]}
    for kernel in bucket["kernels"]:
        assert kernel["name"].encode() in (HERE / f"{case['name']}.cubin").read_bytes()
        for text in kernel["arguments"]:
            assert text in known or evaluate(text, rows) >= 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--seconds", type=float, default=400, help="no timing starts after these")
    args = parser.parse_args()
    manifest = json.loads((HERE / "manifest.json").read_text())
    dry(manifest)
    if args.dry:
        return
    start, driver, device = time.perf_counter(), Driver(), torch.device("cuda")
    name = torch.cuda.get_device_name()
    limits = next((v for key, v in LIMITS.items() if key in name), None)
    results = {"device": name, "torch": torch.__version__, "errors": {}, "times": []}
    chosen = [case for case in manifest["cases"] if args.only in case["name"]]
    kernels = {case["name"]: Case(driver, case) for case in chosen}
    for case in chosen:
        error = check(manifest, case, kernels[case["name"]], device)
        results["errors"][case["name"]] = error
        print(
            f"{case['name']}: error {error:.3f} of what is allowed{'' if error <= 1 else ' WRONG'}"
        )
        save(results)
    for rows in manifest["rows"]:
        for case in chosen:
            if results["errors"][case["name"]] > 1 or time.perf_counter() - start > args.seconds:
                continue
            if not case["is_default"] and bucket_of(case, rows)["is_default"]:
                continue  # timed already
            seconds, size = timed(case, manifest, kernels[case["name"]], rows, device)
            results["times"].append(row_of(case, rows, seconds, size, limits))
            print(results["times"][-1])
            save(results)
    finish(manifest, results, torch.cuda.get_device_properties(0).multi_processor_count)
    wrong = [name for name, error in results["errors"].items() if error > 1]
    raise SystemExit(f"wrong: {', '.join(wrong)}" if wrong else 0)


def finish(manifest, results, multiprocessors):
    """Write how the model's order compares, and the database."""
    results["correlations"] = correlations(manifest, results["times"])
    for name, value in results["correlations"].items():
        print(f"rank correlation, {name}: {'none' if value is None else f'{value:.2f}'}")
    save(results)
    lines = records(manifest, results, multiprocessors)
    write_database(HERE / "database", manifest["arch"], lines)


def row_of(case, rows, seconds, size, limits):
    """A timing with what it reaches."""
    moved = size + rows * (case["k"] * (2 if case["activation"] is None else 1) + 2 * case["n"])
    operations = 2 * rows * case["n"] * case["k"]
    row = {
        "case": case["name"],
        "rows": rows,
        "bucket": bucket_of(case, rows)["rows"],
        "tile": bucket_of(case, rows)["tile"],
        "seconds": seconds["ours"],
        "torch_float16": seconds["torch"],
        "ratio": seconds["torch"] / seconds["ours"],
        "bytes_per_second": moved / seconds["ours"],
        "operations_per_second": operations / seconds["ours"],
    }
    if limits is not None:
        memory, half, int8 = limits
        row["of_memory"] = row["bytes_per_second"] / memory
        row["of_units"] = row["operations_per_second"] / (int8 if case["activation"] else half)
    return row


def save(results):
    (HERE / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
