"""Machine code of INT4 products, and how often a thread executes each instruction."""

import math
import re
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tvm
from matmul_cuda_runs import layout_of, plain, scheduled

from sits_tvm import parse_target
from sits_tvm.device_code import compile_device_code, find_toolkit, record_launches
from sits_tvm.device_code.sass import Instruction, count, disassemble
from sits_tvm.device_code.sass_loops import MMA, find_loops, times_executed, trips_for
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.matmul_cuda.tile import Tile

_STORES = ("STG",)


@dataclass(frozen=True)
class MachineCode:
    """The kernel of one range of rows, with the sums of blocks along k where there are several.

    `executed` counts what a thread of the first one executes, by class and opcode.
    """

    tile: Tile
    n: int
    k: int
    rows: int
    blocks: int
    registers: int
    spills: int
    shared: int
    instructions: list[Instruction]
    sums: list[Instruction]
    group_size: int = 128

    @property
    def weights(self):
        """That a thread decodes."""
        return self.tile.channels * self.tile.units * self.trips * 16 * 64 / 32

    @property
    def products(self):
        """MMAs of a warp."""
        tokens = 1 if self.tile.wgmma else self.tile.tokens
        return self.tile.units * self.trips * self.tile.channels * tokens * self._per_unit

    @property
    def trips(self):
        """Stages of a block."""
        return math.ceil(math.ceil(self.k / 64 / self.tile.step_units) / self.tile.split)

    @property
    def _per_unit(self):
        """MMAs of a unit of 64 columns; those of INT4 have as many, but groups of 32 take two."""
        opcodes = {line.opcode for line in self.instructions if line.family in MMA}
        if any(opcode.startswith("IMMA.16864") for opcode in opcodes):
            return 2 if self.group_size == 32 else 1
        return 2 if any(opcode.startswith(("IMMA", "IGMMA")) for opcode in opcodes) else 4

    def executed(self):
        """Of a block that has all its stages, and all rows of its tile.

        Copies are started as often as there are stages, in front of the loop and in it: those in
        the loop lie behind a branch that its last trips take.
        """
        code = self.instructions
        trips = trips_for(code, self.products, MMA)
        trips = trips_for(code, self._stores, _STORES, known=trips)
        times = times_executed(code, trips)
        loops = [one for one in find_loops(code) if one.start in trips and _has(code, one, MMA)]
        for main in loops:  # one, or none where it is unrolled
            for index in _guarded(code, main):
                times[index] = max(0, times[index] - (self.tile.stages - 1))
        return count(code, times)

    @property
    def _stores(self):
        """Of a thread: four results each."""
        rows = min(self.tile.block_tokens, self.rows)
        return math.ceil(rows * self.tile.block_channels / 4 / self.tile.threads)

    def per_weight(self):
        """Of the sums along k, too, whose threads have four results each."""
        first = self.executed()["total"] / self.weights
        if not self.sums:
            return first
        rows = min(self.tile.block_tokens, self.rows)
        return first + count(self.sums)["total"] * rows * self.n / 4 / (self.n * self.k)

    def per_product(self):
        return self.executed()["total"] / self.products


def _has(code, loop, families):
    return any(code[index].family in families for index in loop.body)


def _guarded(code, loop):
    """Indices between a branch forward in a loop and where it leads, if copies start there."""
    body, found = sorted(loop.body), set()
    for index in body:
        target = re.search(r"0x([0-9a-f]+)$", code[index].operands)
        if code[index].family == "BRA" and target:
            region = range(index + 1, int(target[1], 16) // 16)
            if len(region) and any(code[i].family == "LDGSTS" for i in region):
                found |= set(region)
    return found & loop.body


@lru_cache(maxsize=64)
def machine_code(n, k, rows, activation=None, dtype="float16", arch="sm_90a", tile=None, **spec):
    target = parse_target(f"cuda -arch={arch}")
    func = plain(layout_of(n, k, activation, **spec), rows, dtype)
    ((bucket, space),) = TensorCoreMatmul().spaces(func, target).items()
    kernel = scheduled(func, target, **({bucket: tile} if tile else {}))
    kernel = kernel.with_attr({"tirx.is_scheduled": True, "global_symbol": "main"})
    with record_launches() as launches:
        executable = tvm.compile(tvm.IRModule({"main": kernel}), target=target)
    code = compile_device_code(executable, arch, launches)
    found = {row.name: row for row in code.kernels}
    lines = _lines(code.cubins[0])
    main = found["main_kernel"]
    return MachineCode(
        tile=Tile(*tile) if tile else space.default,
        n=n,
        k=k,
        rows=rows,
        blocks=math.prod(map(int, main.grid)),
        registers=main.registers,
        spills=main.spills,
        shared=main.dynamic_smem,
        instructions=lines["main_kernel"],
        sums=lines.get("main_kernel_1", []),
        group_size=spec.get("group_size", 128),
    )


def _lines(cubin):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return disassemble(find_toolkit().nvdisasm, path)
