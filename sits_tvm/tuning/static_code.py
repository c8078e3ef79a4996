"""The machine code of a candidate, and what the static model says of it."""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.ir import IRModule

from tir_schedules import scheduling_passes
from tir_schedules.records.space import with_parameters
from tir_schedules.records.work import Work

from ..device_code import cuda_sources
from ..device_code.launches import Launch, record_launches
from ..device_code.nvcc import Toolkit, compile_text, read_log, read_waits
from ..device_code.sass import Instruction, disassemble
from ..device_code.sass_loops import MMA, times_executed, trips_for
from ..device_code.sass_pipes import Demand, demand, multiply_adds, opcode_counts
from ..diagnostics import SitsError
from .search import Values
from .static_constants import Device
from .static_model import Estimate, KernelLaunch, estimate
from .static_rejections import kind_of, rejections
from .tasks import Task
from .trials import Trial

_SECONDS = 120
"""For nvcc: code that takes longer is too much for a kernel."""


@dataclass(frozen=True)
class Candidate:
    """Parameters, the work that they make, and the CUDA text with its launches, by kernel."""

    values: Values
    work: Work
    source: str
    launches: Mapping[str, Launch]


@dataclass(frozen=True)
class MachineCode:
    """A kernel that was compiled; `spills` in bytes per thread, `waits` as of `rejections`."""

    name: str
    code: list[Instruction]
    registers: int
    spills: int
    shared: int
    waits: int


def lower_candidate(task: Task, values: Values, work: Work) -> Candidate:
    """The CUDA text of the kernels for the bucket of a task."""
    func = with_parameters(task.func, {task.bucket: values})
    with task.target:
        mod = tvm.transform.Sequential(scheduling_passes(task.target))(IRModule({"main": func}))
        with record_launches() as launches:
            (source,) = cuda_sources(tvm.compile(mod, target=task.target))
    return Candidate(values, work, source, launches)


def judge(candidate: Candidate, device: Device, arch: str, tools: Toolkit) -> Trial:
    """Compile a candidate and estimate its seconds; or why there is no use in that."""
    try:
        kernels = compile_kernels(candidate.source, arch, tools)
    except SitsError as error:
        return Trial(candidate.values, None, "build error", error.diagnostics[0].message)
    except subprocess.TimeoutExpired:
        return Trial(candidate.values, None, "timeout", f"nvcc takes more than {_SECONDS} s")
    return judge_code(candidate, kernels, device)


def judge_code(candidate: Candidate, kernels: list[MachineCode], device: Device) -> Trial:
    """As `judge`, once there is machine code."""
    found = reasons(candidate, kernels, device)
    if found:
        return Trial(candidate.values, None, kind_of(found[0]), "; ".join(found))
    seconds = sum(one.seconds for one in estimates(candidate, kernels, device))
    return Trial(candidate.values, seconds)


def compile_kernels(source: str, arch: str, tools: Toolkit) -> list[MachineCode]:
    """SitsError and TimeoutExpired if nvcc does not."""
    assert tools.nvdisasm is not None
    with tempfile.TemporaryDirectory() as folder:
        cubin, log = compile_text(tools, arch, source, Path(folder), seconds=_SECONDS)
        code = disassemble(tools.nvdisasm, cubin)
    waits = Counter(name for name, _ in read_waits(log))
    return [
        MachineCode(name, code[name], registers, spills, shared, waits[name])
        for name, registers, spills, shared in read_log(log)
    ]


def reasons(candidate: Candidate, kernels: list[MachineCode], device: Device) -> list[str]:
    """Why a candidate is rejected; that SMs have no block, the estimate tells better."""
    work, found = candidate.work, []
    for kernel in kernels:
        launch = _launch(candidate, kernel, device)
        multiplies = _multiplies(kernel)
        found += rejections(
            kernel.code,
            _times(kernel, work),
            launch,
            spills=kernel.spills,
            waits=kernel.waits,
            weight_bytes=work.weight_bytes if multiplies else 0,
            most_blocks=launch.blocks,
            device=device,
        )
    return found


def estimates(candidate: Candidate, kernels: list[MachineCode], device: Device) -> list[Estimate]:
    """Of each kernel; they run one after the other."""
    return [
        estimate(
            demand(opcode_counts(kernel.code, _times(kernel, candidate.work)), device.arch),
            _launch(candidate, kernel, device),
            device,
        )
        for kernel in kernels
    ]


def screen(work: Work, device: Device) -> float:
    """Seconds that an estimate comes to at least, before there is machine code."""
    launch = KernelLaunch(
        blocks=work.blocks,
        threads=work.threads,
        registers=work.registers,
        shared=work.shared,
        hbm_bytes=work.hbm_bytes,
        beyond_l2=_beyond_l2(work, device),
        in_flight=work.in_flight,
        copied=work.copied,
    )
    seconds = estimate(demand(work.opcodes, device.arch), launch, device).seconds
    if work.output_bytes:
        nothing = Demand(0, {"issue": 0.0}, 0, 0, 0, {})
        moved = work.output_bytes + _beyond_l2(work, device)
        small = KernelLaunch(blocks=1, threads=32, registers=16, shared=0, hbm_bytes=moved)
        seconds += estimate(nothing, small, device).seconds
    return seconds


def _multiplies(kernel: MachineCode) -> bool:
    return any(line.family in MMA for line in kernel.code)


def _times(kernel: MachineCode, work: Work) -> list[int]:
    shapes = {multiply_adds(line.opcode) for line in kernel.code if line.family in MMA}
    if not shapes:
        return times_executed(kernel.code)
    (shape,) = shapes
    assert shape is not None
    return times_executed(kernel.code, trips_for(kernel.code, work.multiply_adds // shape))


def _beyond_l2(work: Work, device: Device) -> int:
    """Bytes of parts that the cache has no room for: written to memory, and read from there."""
    return max(0, work.partial_bytes - device.l2_bytes)


def _launch(candidate: Candidate, kernel: MachineCode, device: Device) -> KernelLaunch:
    launch, work = candidate.launches[kernel.name], candidate.work
    multiplies = _multiplies(kernel)
    return KernelLaunch(
        blocks=math.prod(map(int, launch.grid)),
        threads=math.prod(map(int, launch.block)),
        registers=kernel.registers,
        shared=kernel.shared + int(launch.dynamic_smem),
        hbm_bytes=work.hbm_bytes if multiplies else work.output_bytes,
        beyond_l2=_beyond_l2(work, device),
        in_flight=work.in_flight if multiplies else None,
        copied=work.copied if multiplies else None,
    )
