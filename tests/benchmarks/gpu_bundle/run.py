"""Check the kernels of this folder on a GPU against float64, then time them beside torch's float16.

    python run.py [--dry] [--only NAME] [--seconds 400]

Needs torch with CUDA, numpy and the driver. `--dry` needs no GPU: it checks the files, how the
weights are unpacked, and every launch. Writes results.json and records.jsonl.

Times are of CUDA graphs that walk through copies of the weight of more than twice the L2 cache.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

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
DYNAMIC_SHARED_MEMORY = 8


# Weights


def unpacked(parts, case):
    """Codes minus zero points (n, groups, group size), and scales (n, groups), in float64."""
    unit = case["unit"]
    codes = _from_words(parts["codes"], unit["code"])[: case["n"], : case["padded_k"]]
    lane = torch.tensor(unit["lane"], device=codes.device)
    _, groups, _ = parts["scale"].shape
    scale = parts["scale"].to(torch.float64)[:, :, lane].transpose(1, 2).reshape(-1, groups)
    zero = torch.tensor(8.0, dtype=torch.float64, device=codes.device)
    if "zero_point" in parts:
        zeros = _from_words(parts["zero_point"], unit["zero"])
        zero = zeros[: case["n"], : case["groups"], None].to(torch.float64)
    level = codes.reshape(case["n"], case["groups"], -1).to(torch.float64) - zero
    return level, scale[: case["n"]]


def _from_words(words, place):
    """Nibbles of words (tiles, units, words), each row and column of a unit in its place."""
    tiles, units, _ = words.shape
    index = torch.tensor(place, device=words.device)
    shifts = 4 * torch.arange(8, device=words.device)
    nibbles = (words.to(torch.int64)[..., None] >> shifts & 15).to(torch.uint8)
    found = nibbles.reshape(tiles, units, -1)[..., index]
    return found.transpose(1, 2).reshape(tiles * index.shape[0], units * index.shape[1])


def drawn(case, device, generator):
    """Random parts: every code, and scales that keep results near 1."""
    parts = {}
    for name, shape in case["shapes"].items():
        if name == "scale":
            size = torch.rand(shape, generator=generator, device=device) + 0.5
            parts[name] = (size / (4 * case["k"] ** 0.5)).to(torch.float16)
        else:
            span = (-(2**31), 2**31)
            parts[name] = torch.randint(*span, shape, generator=generator, device=device).to(
                torch.int32
            )
    return parts


# Activations


def activations(case, rows, columns, device, generator):
    """Arguments by name, and X in float64 (rows, groups, group size) with its scales."""
    dtype = getattr(torch, case["dtype"])
    if case["activation"] is None:
        x = torch.randn((rows, case["k"]), generator=generator, device=device).to(dtype)
        filled = torch.zeros((rows, case["padded_k"]), dtype=torch.float64, device=device)
        filled[:, : case["k"]] = x
        return {"X_rows": x}, filled.reshape(rows, case["groups"], -1), None
    codes = torch.randint(-127, 128, (rows, case["padded_k"]), generator=generator, device=device)
    codes[:, case["k"] :] = 0
    order = torch.tensor(columns, device=device)
    words = codes.reshape(rows, -1, 8)[..., order].to(torch.int8).contiguous().view(torch.int32)
    scale = torch.rand((rows, case["scales_of_a_row"]), generator=generator, device=device) / 64
    grouped = codes.reshape(rows, case["groups"], -1)
    sums = grouped.sum(-1).to(torch.int32)
    arguments = {"X_rows": words, "X_scale_rows": scale, "X_sums_rows": sums}
    return arguments, grouped.to(torch.float64), scale.to(torch.float64)


def expected(case, level, scale, x, x_scale):
    """The product and its sum of magnitudes, in float64."""
    if x_scale is not None:
        x = x * x_scale.repeat_interleave(case["groups"] // x_scale.shape[1], dim=1)[..., None]
    weight = (level * scale[..., None]).flatten(1)
    x = x.flatten(1)
    return x @ weight.T, x.abs() @ weight.abs().T


# Kernels


class Driver:
    """Loads and launches cubins by the CUDA driver, in torch's context and stream."""

    def __init__(self):
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} fails with CUDA error {status}")

    def load(self, cubin):
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        return module

    def function(self, module, kernel):
        found = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(found), module, kernel["name"].encode())
        if kernel["dynamic_smem"] > 48 << 10:
            size = kernel["dynamic_smem"]
            self.call("cuFuncSetAttribute", found, DYNAMIC_SHARED_MEMORY, size)
        return found

    def launch(self, function, kernel, arguments, rows):
        grid, block = extents(kernel["grid"], rows), extents(kernel["block"], rows)
        values = [argument(text, arguments, rows) for text in kernel["arguments"]]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = kernel["dynamic_smem"]
        self.call("cuLaunchKernel", function, *grid, *block, size, stream, pointers, None)


def extents(texts, rows):
    found = [evaluate(text, rows) for text in texts]
    return [*found, *[1] * (3 - len(found))]


def evaluate(text, rows):
    """An integer expression of the number of rows m."""
    return int(eval(text, {"__builtins__": {}, "min": min, "max": max}, {"m": rows}))


def argument(text, arguments, rows):
    if text in arguments:
        return ctypes.c_void_p(arguments[text].data_ptr())
    return ctypes.c_int64(evaluate(text, rows))


class Case:
    """The kernels of a case, by range of rows."""

    def __init__(self, driver, case):
        self.driver, self.case = driver, case
        module = driver.load((HERE / f"{case['name']}.cubin").read_bytes())
        self.functions = {
            kernel["name"]: driver.function(module, kernel)
            for bucket in case["buckets"]
            for kernel in bucket["kernels"]
        }

    def run(self, arguments, rows):
        for kernel in bucket_of(self.case, rows)["kernels"]:
            self.driver.launch(self.functions[kernel["name"]], kernel, arguments, rows)


def outputs_of(case, rows, device):
    """The output, of NaN, and room for the sums of blocks along k."""
    split, n, dtype = (
        bucket_of(case, rows)["tile"]["split"],
        case["n"],
        getattr(torch, case["dtype"]),
    )
    return {
        case["output"]: torch.full((rows, n), torch.nan, dtype=dtype, device=device),
        "partial": torch.empty((split, rows, -(-n // 4) * 4), device=device),
    }


def bucket_of(case, rows):
    return next(b for b in case["buckets"] if b["most"] is None or rows <= b["most"])


# What is done with them


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
    tile, (product, *sums) = bucket["tile"], bucket["kernels"]
    x, y, _ = extents(product["grid"], rows)
    channels = 16 * tile["channels"] * tile["warps_n"]
    tokens = 8 * tile["tokens"] * tile["warps_m"]
    assert x == -(-case["n"] // channels) * -(-rows // tokens), f"{case['name']}: {x} blocks"
    assert y == tile["split"]
    assert bool(sums) == (tile["split"] > 1)
    known = {"X_rows", "X_scale_rows", "X_sums_rows", "partial", case["output"], *case["shapes"]}
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
            seconds, size = timed(case, manifest, kernels[case["name"]], rows, device)
            results["times"].append(row_of(case, rows, seconds, size, limits))
            print(results["times"][-1])
            save(results)
    wrong = [name for name, error in results["errors"].items() if error > 1]
    raise SystemExit(f"wrong: {', '.join(wrong)}" if wrong else 0)


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
