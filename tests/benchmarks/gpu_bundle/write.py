"""Write a folder that checks and times the INT4 kernels on a machine with an NVIDIA GPU.

    python tests/benchmarks/gpu_bundle/write.py FOLDER [--arch sm_90a]

It holds cubins, manifest.json, samples.npz and a runner, which needs torch, numpy and the driver,
and no TVM: `python run.py`. Each case is a product for any number of rows; its kernels, how they
are launched, and how its weight is packed are in the manifest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

from sits_tvm import parse_target
from sits_tvm.config import QuantSpec
from sits_tvm.device_code import Launch, compile_device_code, record_launches
from tir_schedules.int4_matmul import int4_matmul
from tir_schedules.int8_matmul import BYTES_PER_WORD, int8_matmul, scale_columns
from tir_schedules.matmul_cuda import TensorCoreMatmul
from tir_schedules.matmul_cuda import _recognise as recognise
from tir_schedules.matmul_cuda_spaces import distinct
from tir_schedules.packed_order import CODES_PER_WORD
from tir_schedules.packing import PackedLayout, pack, unpack

FORMAT = 1
RUNNER = ("run.py", "launch.py", "reference.py")
ORDER = "fragments"
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
"""That are timed."""
LLAMA = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
CASES = [
    *((n, k, None, "float16", 128, True) for n, k in LLAMA),
    *((n, k, "int8", "float16", 128, True) for n, k in LLAMA),
    (4096, 4096, None, "float16", 128, False),
    (4096, 4096, None, "float16", 32, True),
    (4096, 4096, None, "float16", -1, True),
    (4096, 4096, None, "bfloat16", 128, False),
    (4096, 4096, "int8", "float16", 128, False),
    (4096, 4096, "int8", "float16", -1, True),
    (4096, 4096, "int8", "float16", -1, False),
    (4100, 4304, None, "float16", 32, False),
    (4100, 4304, "int8", "bfloat16", 64, False),
]
"""n, k, activation, dtype, group size, symmetric; the last ones are ragged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    args = parser.parse_args()
    write(args.folder, args.arch)


def write(folder: Path, arch: str, cases: list[tuple[Any, ...]] = CASES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = parse_target(f"cuda -arch={arch}")
    manifest = {
        "format": FORMAT,
        "arch": arch,
        "rows": ROWS,
        "int8_columns": int8_columns(),
        "cases": [write_case(folder, target, *case) for case in cases],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    np.savez(folder / "samples.npz", **samples())
    for name in RUNNER:
        shutil.copy(Path(__file__).with_name(name), folder / name)


def write_case(folder: Path, target: Target, *case: Any) -> dict[str, Any]:
    """Compile a case; its entry in the manifest."""
    entry, executable, launches = built(target, *case)
    (cubin,) = compile_device_code(executable, str(target.attrs["arch"]), launches).cubins
    (folder / f"{entry['name']}.cubin").write_bytes(cubin)
    return {**entry, "sha256": hashlib.sha256(cubin).hexdigest()}


def built(
    target: Target,
    n: int,
    k: int,
    activation: str | None,
    dtype: str,
    group_size: int,
    symmetric: bool,
) -> tuple[dict[str, Any], Any, dict[str, Launch]]:
    """The entry of a case, its executable, and the launches of its kernels."""
    spec = QuantSpec(group_size=group_size, symmetric=symmetric, activation=activation)
    layout, rule = PackedLayout(n, k, spec, ORDER), TensorCoreMatmul()
    func = (
        int8_matmul(None, layout, dtype)
        if activation == "int8"
        else int4_matmul(None, n, k, spec, dtype, ORDER)
    )
    scheduled = rule.apply(func, target, False)
    assert scheduled is not None
    kernel = scheduled.mod["main"].with_attr({"tirx.is_scheduled": True, "global_symbol": "main"})
    with record_launches() as launches:
        executable = tvm.compile(tvm.IRModule({"main": kernel}), target=target)
    kind = "sym" if symmetric else "asym"
    entry = {
        "name": f"{n}x{k}_{activation or 'float'}_{dtype}_g{group_size}_{kind}",
        "n": n,
        "k": k,
        "activation": activation,
        "dtype": dtype,
        "group_size": layout.group_size,
        "groups": layout.groups,
        "padded_k": layout.padded_k,
        "symmetric": symmetric,
        "shapes": dict(zip(layout.names, layout.shapes, strict=True)),
        "scales_of_a_row": layout.padded_k // scale_columns(k, layout.group_size),
        "unit": unit(layout),
        "output": str(kernel.params[-1].name),
        "buckets": list(buckets(func, target, launches)),
    }
    return entry, executable, launches


def buckets(
    func: tirx.PrimFunc, target: Target, launches: dict[str, Launch]
) -> Iterator[dict[str, Any]]:
    """Of each range of rows, its tile and kernels in the order in which they run."""
    (_, operands), spaces = recognise(func, target), TensorCoreMatmul().spaces(func, target)
    spaces = distinct(operands, spaces, {name: one.default for name, one in spaces.items()})
    left = [(name, launch) for name, launch in sorted(launches.items(), key=_number)]
    for rows, space in spaces.items():
        count = 2 if space.default.split > 1 else 1
        kernels = [{"name": name, **asdict(launch)} for name, launch in left[:count]]
        left = left[count:]
        tile = asdict(space.default)
        yield {"rows": rows, "most": space.most, "tile": tile, "kernels": kernels}
    assert not left


def _number(item: tuple[str, Launch]) -> int:
    return int(item[0].removeprefix("main_kernel").removeprefix("_") or 0)


def unit(layout: PackedLayout) -> dict[str, Any]:
    """Where the codes of a unit, the scales of its rows and the zero points of groups are."""
    codes, zeros = layout.unit, layout.zero_unit
    word, nibble = codes.place(*np.indices((codes.rows, codes.columns)))
    zero_word, zero_nibble = zeros.place(*np.indices((zeros.rows, zeros.columns)))
    return {
        "code": (word * CODES_PER_WORD + nibble).tolist(),
        "lane": [int(codes.lane(row)) for row in range(codes.rows)],
        "zero": (zero_word * CODES_PER_WORD + zero_nibble).tolist(),
    }


def int8_columns() -> list[int]:
    """The column of each byte of two words of INT8 activations, see `int8_matmul`."""
    return [2 * (byte % BYTES_PER_WORD) + byte // BYTES_PER_WORD for byte in range(8)]


def samples() -> dict[str, np.ndarray]:
    """Small packed weights and what they stand for, to check the runner by."""
    rng, found = np.random.default_rng(0), {}
    weight = rng.standard_normal((40, 200)).astype("float32")
    for activation in (None, "int8"):
        spec = QuantSpec(group_size=32, symmetric=False, activation=activation)
        layout, parts = PackedLayout(40, 200, spec, ORDER), pack(weight, spec, ORDER)
        kind = activation or "float"
        found |= {f"{kind}.{name}": part for name, part in zip(layout.names, parts, strict=True)}
        found[f"{kind}.weight"] = unpack(parts, layout)
        found[f"{kind}.unit"] = np.array(json.dumps(unit(layout)))
    return found


if __name__ == "__main__":
    main()
