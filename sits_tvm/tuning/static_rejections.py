"""Candidates that no estimate is worth making for, from their machine code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .._target_gpu import shared_memory_limit
from ..device_code.sass import Instruction
from ..device_code.sass_pipes import WARP, width
from .static_constants import H200, Device
from .static_model import KernelLaunch, resident_blocks

_WIDE = 16  # bytes per thread
_EMULATED = "sub_byte"  # in the name of the routine that stands for an MMA with INT4 operands
_COPIES = ("UTMALDG", "UBLKCP", "UBLKPF")  # of a whole tile by one thread

_KINDS = (
    "spilled",
    "waits",
    "local memory",
    "INT4 operands",
    "calls",
    "128-bit loads",
    "shared memory",
    "no block",
    "blocks for",
)
"""What tells one reason from another, however many bytes it names."""


def rejections(
    instructions: Sequence[Instruction],
    times: Sequence[int],
    launch: KernelLaunch,
    *,
    spills: int,
    weight_bytes: int,
    most_blocks: int,
    waits: int = 0,
    device: Device = H200,
) -> list[str]:
    """Why a kernel is not to be considered; empty if it is.

    Parameters
    ----------
    times : list of int
        From `times_executed`, with the right trips.
    spills : int
        Bytes per thread that the compiler says it stores and loads.
    weight_bytes : int
        Of the packed weight, which loads of 128 bits per thread must move.
    most_blocks : int
        That the workload could be split in; more than a device has SMs need not be used.
    waits : int
        Places where the compiler says that products of warpgroups wait for each other, which an
        estimate does not see.
    """
    done = [line for line, n in zip(instructions, times, strict=True) if n]
    return [
        *_memory(done, spills),
        *([f"{waits} waits for products of warpgroups"] if waits else []),
        *_calls(done, device),
        *_loads(instructions, times, launch, weight_bytes),
        *_fit(launch, device, most_blocks),
    ]


def kind_of(reason: str) -> str:
    """What reasons that differ in their numbers have in common."""
    return next((kind for kind in _KINDS if kind in reason), reason)


def _memory(done: Sequence[Instruction], spills: int) -> list[str]:
    found = [f"{spills} bytes are spilled"] if spills else []
    local = sum(line.family in ("LDL", "STL") for line in done)
    return found + ([f"local memory is accessed by {local} instructions"] if local else [])


def _calls(done: Sequence[Instruction], device: Device) -> list[str]:
    """Calls, and products of INT4 operands where tensor cores have none."""
    called = sorted({line.operands for line in done if line.family == "CALL"})
    found = [f"calls {name}" for name in called]
    native = any(re.match(r"IMMA\..*\.[SU]4\b", line.opcode) for line in done)
    if any(_EMULATED in name for name in called) or (native and device.arch != "sm_80"):
        found.append(f"an MMA has INT4 operands, which {device.arch} emulates")
    return found


def _loads(
    instructions: Sequence[Instruction],
    times: Sequence[int],
    launch: KernelLaunch,
    weight_bytes: int,
) -> list[str]:
    lines = list(zip(instructions, times, strict=True))
    if any(line.family in _COPIES and n for line, n in lines):
        return []
    loads = [(width(x.opcode), n) for x, n in lines if x.family in ("LDG", "LDGSTS")]
    per_thread = sum(size * n for size, n in loads if size >= _WIDE)
    wide = per_thread * launch.warps * WARP * launch.blocks
    if wide >= weight_bytes:
        return []
    return [f"128-bit loads move {wide} of {weight_bytes} bytes of weights"]


def _fit(launch: KernelLaunch, device: Device, most_blocks: int) -> list[str]:
    found = []
    most = shared_memory_limit(device.arch)
    if launch.shared > most:
        found.append(f"{launch.shared} bytes of shared memory, of {most}")
    else:
        try:
            resident_blocks(launch, device)
        except ValueError as error:
            found.append(str(error))
    if launch.blocks < min(device.sms, most_blocks):
        found.append(
            f"{launch.blocks} blocks for {device.sms} SMs, where {most_blocks} are possible"
        )
    return found
