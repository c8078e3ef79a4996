"""Write a folder that checks and times the INT4 kernels on a machine with an NVIDIA GPU.

    python tests/benchmarks/gpu_bundle/write.py FOLDER [--arch sm_90a]

It holds cubins, manifest.json, samples.npz and a runner, which needs torch, numpy and the driver,
and no TVM: `python run.py`. Each case is a product for any number of rows; its kernels, how they
are launched, how its weight is packed, and what the static model says are in the manifest. Of some
products there are other tiles than the default, to see whether the model puts them in order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.target import Target

from sits_tvm import parse_target
from sits_tvm.config import QuantSpec
from sits_tvm.device_code import Launch, compile_device_code, cuda_sources, record_launches
from tests.benchmarks.gpu_bundle.estimates import estimates, record_of, seconds_at_most
from tir_schedules.int4_format.packed_order import CODES_PER_WORD
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack
from tir_schedules.matmul.int4_matmul import int4_matmul
from tir_schedules.matmul.int8_matmul import BYTES_PER_WORD, int8_matmul, scale_columns
from tir_schedules.matmul_cuda.operands import Operands
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.matmul_cuda.rule import _recognise as recognise
from tir_schedules.matmul_cuda.spaces import distinct, tile_fault
from tir_schedules.matmul_cuda.tile import Tile
from tir_schedules.records.space import Space, Spaces, with_parameters

RUNNER = ("run.py", "launch.py", "reference.py", "ranking.py")
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
    (4096, 4096, None, "float32", 128, True),
    (4096, 14336, None, "float32", 128, False),
    (4100, 4304, None, "float16", 32, False),
    (4100, 4304, "int8", "bfloat16", 64, False),
    (1000, 1032, None, "float32", 32, False),
]
"""n, k, activation, dtype, group size, symmetric; the last ones are ragged."""
COMPARED = [
    (4096, 4096, None, "float16", 128, True),
    (14336, 4096, None, "float16", 128, True),
    (4096, 4096, "int8", "float16", 128, True),
]
CHANGES = ({"stages": 2}, {"split": 1}, {"split": 8}, {"wgmma": 0}, {"channels": 1, "warps_k": 2})
"""Of these products, the tiles that differ so from the defaults, where there is a kernel."""

MOST_SECONDS, MOST_BYTES = 480, 40 << 20
"""Of a run on a GPU, as `seconds_at_most` bounds it, and of the folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    args = parser.parse_args()
    write(args.folder, args.arch)


def write(folder: Path, arch: str, cases: list[tuple[Any, ...]] = CASES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = parse_target(f"cuda -arch={arch}")
    changed = [(case, change) for case in COMPARED if case in cases for change in CHANGES]
    manifest = {
        "arch": arch,
        "rows": ROWS,
        "int8_columns": int8_columns(),
        "record": record_of(target),
        "cases": [
            write_case(folder, target, case, change)
            for case, change in [*((case, {}) for case in cases), *changed]
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    np.savez(folder / "samples.npz", **samples())
    for name in RUNNER:
        shutil.copy(Path(__file__).with_name(name), folder / name)
    size, seconds = sum(x.stat().st_size for x in folder.iterdir()), seconds_at_most(manifest)
    print(f"{size / 2**20:.1f} MiB, at most {seconds:.0f} s on a {manifest['record']['device']}")
    assert size < MOST_BYTES
    assert seconds < MOST_SECONDS


def write_case(
    folder: Path, target: Target, case: tuple[Any, ...], change: dict[str, int]
) -> dict[str, Any]:
    """Compile a case; its entry in the manifest."""
    entry, executable, launches = built(target, *case, change=change)
    arch = str(target.attrs["arch"])
    (cubin,) = compile_device_code(executable, arch, launches).cubins
    (folder / f"{entry['name']}.cubin").write_bytes(cubin)
    (source,) = cuda_sources(executable)
    entry["estimates"] = estimates(entry, source, target, ROWS)
    return {**entry, "sha256": hashlib.sha256(cubin).hexdigest()}


def built(
    target: Target,
    n: int,
    k: int,
    activation: str | None,
    dtype: str,
    group_size: int,
    symmetric: bool,
    change: Mapping[str, int] = {},
) -> tuple[dict[str, Any], Any, dict[str, Launch]]:
    """The entry of a case, its executable, and the launches of its kernels."""
    spec = QuantSpec(group_size=group_size, symmetric=symmetric, activation=activation)
    layout, rule = PackedLayout(n, k, spec, ORDER), TensorCoreMatmul()
    func = (
        int8_matmul(None, layout, dtype)
        if activation == "int8"
        else int4_matmul(None, n, k, spec, dtype, ORDER)
    )
    found = recognise(func, target)
    assert found is not None
    spaces = rule.spaces(func, target)
    tiles = {name: changed(found[1], one, change, target) for name, one in spaces.items()}
    given = {name: asdict(tile) for name, tile in tiles.items()}
    scheduled = rule.apply(with_parameters(func, given), target, False)
    assert scheduled is not None
    kernel = scheduled.mod["main"].with_attr({"tirx.is_scheduled": True, "global_symbol": "main"})
    with record_launches() as launches:
        executable = tvm.compile(tvm.IRModule({"main": kernel}), target=target)
    kind = "sym" if symmetric else "asym"
    names = [f"{n}x{k}", activation or "float", dtype, f"g{group_size}", kind]
    names += [f"{name}={value}" for name, value in change.items()]
    entry = {
        "name": "_".join(names),
        "workload": asdict(rule.workload(func, target)),
        "is_default": not change,
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
        "term_words": 3 * (-(-k // 8) * 8) // 2 if dtype == "float32" else 0,
        "buckets": list(buckets(found[1], spaces, tiles, launches)),
    }
    return entry, executable, launches


def changed(operands: Operands, space: Space, change: Mapping[str, int], target: Target) -> Tile:
    """The default of a range of rows with other values, where there is such a kernel."""
    if any(value not in space.values(field) for field, value in change.items()):
        return space.default
    tile = replace(space.default, **change)
    fault = tile_fault(replace(operands, most=space.most), tile, target)
    return space.default if fault else tile


def buckets(
    operands: Operands, spaces: Spaces, tiles: dict[str, Tile], launches: dict[str, Launch]
) -> Iterator[dict[str, Any]]:
    """Of each range of rows, its tile and kernels in the order in which they run: terms of X, if
    there are any, are made by the first kernel of all."""
    left = [{"name": name, **asdict(one)} for name, one in sorted(launches.items(), key=_number)]
    terms, left = left[: operands.terms > 1], left[operands.terms > 1 :]
    own, used = distinct(operands, spaces, tiles), 0
    for rows, space in spaces.items():
        count = 2 if tiles[rows].split > 1 else 1
        yield {
            "rows": rows,
            "most": space.most,
            "tile": asdict(tiles[rows]),
            "is_default": tiles[rows] == space.default,
            "kernels": terms + left[used : used + count],
        }
        used += count if rows in own else 0  # else the next range has the same kernels
    assert used == len(left)


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
