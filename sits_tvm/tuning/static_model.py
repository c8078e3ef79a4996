"""Estimate how long a launch of a CUDA kernel takes, from its machine code, on no GPU.

The estimate is a lower bound, to put candidates in order: never a speed. It takes every pipe of an
SM at its full rate, memory at the rate of the data sheet, and all of them in parallel; it does not
know of stalls, bank conflicts, or caches beyond what `KernelLaunch.hbm_bytes` says.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from ..device_code.sass_pipes import MEMORY_BYTES, PER_SCHEDULER, WARP, Demand
from ..report_tables import render_table
from .static_constants import (
    H200,
    LOADED_LATENCY,
    MODEL_VERSION,
    REGISTER_UNIT,
    SHARED_UNIT,
    TIE,
    Device,
)

_SCHEDULERS = 4


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """How a kernel is launched and what it moves.

    Attributes
    ----------
    blocks, threads : int
        Of the grid, and of a block.
    registers : int
        Per thread.
    shared : int
        Bytes per block, static and dynamic.
    hbm_bytes : int
        That memory must deliver or take at least: each weight, activation and output once.
    in_flight : int or None
        Bytes from memory that a block has under way at any time: (stages - 1) times a tile of
        weights. None where that is not known (plain loads): no bound then.
    beyond_l2 : int
        More bytes that memory must take or deliver: parts of sums that the L2 cache does not hold.
    copied : int or None
        Bytes that the asynchronous copies of a block move. None: what its machine code does at
        most, which is too much of a pipeline, whose copies stop before its last steps.
    """

    blocks: int
    threads: int
    registers: int
    shared: int
    hbm_bytes: int
    in_flight: int | None = None
    beyond_l2: int = 0
    copied: int | None = None

    @property
    def warps(self) -> int:
        """Of a block."""
        return math.ceil(self.threads / WARP)


@dataclass(frozen=True)
class Estimate:
    """Seconds of a launch, and what they come from.

    Attributes
    ----------
    seconds : float
    bound : str
        The term that takes longest.
    terms : dict of str to float
        Seconds, had the launch nothing else to wait for: a pipe of `Demand.cycles`; "hbm"; "l2",
        all bytes loaded and stored; "in flight", those of memory at one latency per round.
        "start", the latency before the first data, comes on top of the longest.
    resident : int
        Blocks that fit an SM at a time.
    waves : float
        Blocks of the grid over those that fit the device.
    unknown : dict of str to int
        Opcodes that are counted for issue only.
    """

    device: str
    seconds: float
    bound: str
    terms: dict[str, float]
    resident: int
    waves: float
    unknown: dict[str, int]
    version: int = MODEL_VERSION

    def __str__(self) -> str:
        ranking = sorted(self.terms.items(), key=lambda term: -term[1])
        rows = [[name, f"{seconds * 1e6:.2f}"] for name, seconds in ranking]
        text = f"{self.device}: at least {self.seconds * 1e6:.2f} us, bound by {self.bound}; "
        text += f"{self.resident} blocks per SM, {self.waves:.2f} waves (model {self.version})"
        if self.unknown:
            text += f"\nfor issue only: {', '.join(sorted(self.unknown))}"
        return f"{text}\n{render_table(['term', 'us'], rows)}"


def estimate(demand: Demand, launch: KernelLaunch, device: Device = H200) -> Estimate:
    """The least time of a launch whose warps have this demand.

    Blocks run in waves of as many as fit; a last one that is not full is spread over all SMs, and
    ends with the SM that has most of it. A wave takes as long as its longest term.

    Raises
    ------
    ValueError
        If not even one block fits an SM.
    """
    resident = resident_blocks(launch, device)
    slots = resident * device.sms
    full, rest = divmod(launch.blocks, slots)
    waves = [(slots, full), (rest, int(rest > 0))]
    total: defaultdict[str, float] = defaultdict(float)
    seconds = LOADED_LATENCY
    for blocks, times in waves:
        terms = _wave(demand, launch, device, blocks)
        seconds += times * max(terms.values())
        for name, value in terms.items():
            total[name] += times * value
    bound = max(total, key=lambda name: total[name])
    terms = {**total, "start": LOADED_LATENCY}
    return Estimate(
        device.name,
        seconds,
        bound,
        terms,
        resident,
        launch.blocks / slots,
        demand.unknown,
    )


def is_tie(first: Estimate, second: Estimate) -> bool:
    """Whether two estimates are too near to each other to say which is faster."""
    low, high = sorted((first.seconds, second.seconds))
    return high - low <= TIE * low


def resident_blocks(launch: KernelLaunch, device: Device) -> int:
    """Blocks that an SM holds at a time.

    Raises
    ------
    ValueError
        If there is no room for one.
    """
    per_warp = _rounded(launch.registers * WARP, REGISTER_UNIT)
    warps = device.registers // per_warp // _SCHEDULERS * _SCHEDULERS
    shared = _rounded(launch.shared + device.reserved, SHARED_UNIT)
    limits = {
        "warps": device.warps // launch.warps,
        "registers": warps // launch.warps,
        "shared memory": device.shared // shared,
        "blocks": device.blocks,
    }
    fewest = min(limits, key=lambda name: limits[name])
    if not limits[fewest]:
        raise ValueError(f"no block of {launch} fits an SM of {device.name}: too few {fewest}")
    return limits[fewest]


def _wave(demand: Demand, launch: KernelLaunch, device: Device, blocks: int) -> dict[str, float]:
    """Seconds by term of so many blocks at a time."""
    most = math.ceil(blocks / device.sms)
    warps = most * launch.warps
    by_fours = _rounded(warps, _SCHEDULERS)  # the scheduler with most warps ends last
    terms = {
        pipe: cycles * (by_fours if pipe in PER_SCHEDULER else warps) / device.clock
        for pipe, cycles in demand.cycles.items()
    }
    copied = demand.copied * launch.warps if launch.copied is None else launch.copied
    terms["l1"] = terms.get("l1", 0.0) + copied * most / MEMORY_BYTES / device.clock
    moved = (demand.loaded + demand.stored) * launch.warps + copied
    terms["l2"] = moved * blocks / device.l2
    share = blocks / launch.blocks
    terms["hbm"] = (launch.hbm_bytes + launch.beyond_l2) * share / device.hbm
    if launch.in_flight is not None:
        terms["in flight"] = launch.hbm_bytes / launch.blocks * LOADED_LATENCY / launch.in_flight
    return terms


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit
