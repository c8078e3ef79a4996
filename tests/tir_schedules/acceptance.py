"""What machine code of an INT4 product must keep to, and how it compares with published kernels.

    accepted = accept(code, kind="W4A16 g128", n=4096, k=4096, rows=1, launch=launch)
    print(accepted)
    assert accepted.failures == []

Counts are upper bounds: what a thread executes from the first instruction to EXIT, with the trips
that its share of products makes of the loops.
"""

import math
from dataclasses import dataclass, replace

from int4_yardsticks import YARDSTICKS

from sits_tvm.device_code.sass import count
from sits_tvm.device_code.sass_loops import MMA, find_loops, main_loop, times_executed, trips_for
from sits_tvm.device_code.sass_pipes import multiply_adds
from sits_tvm.report_tables import render_table
from sits_tvm.tuning.static_constants import H200
from sits_tvm.tuning.static_model import resident_blocks
from sits_tvm.tuning.static_rejections import rejections

DECODE, FEW_ROWS = 16, 64
"""The most rows of the first two columns of the lines below; any more are a prefill."""

PER_WEIGHT = {
    "W4A16 g128": (2.0, 2.6),
    "W4A16 per channel": (None, None),
    "W4A8 per channel": (1.0, 1.8),
    "W4A8 g128": (1.5, 2.5),
}
"""Instructions that a thread may execute per weight that it decodes, of up to 16 and 64 rows.
None: there is no line."""

PER_MMA = {"HMMA.16816": (None, 5.0, 3.5), "IMMA.16832": (None, None, 4.5)}
"""And per MMA, of up to 16, up to 64 and more rows."""

IN_FLIGHT = (40 << 10, 40 << 10, 64 << 10)
"""Bytes that an SM must have under way, likewise."""

WARPS = 8
"""Of an SM, at least."""


@dataclass(frozen=True)
class Acceptance:
    """Instructions of a thread per weight and MMA, executed and in the main loop (None without).

    `failures` says what is not kept; loops that start at `once` are counted as one trip.
    """

    kind: str
    per_weight: float
    per_mma: float | None
    loop_per_weight: float | None
    loop_per_mma: float | None
    failures: list[str]
    once: list[int]

    def __str__(self):
        lines = [f"not kept: {failure}" for failure in self.failures] or ["all lines are kept"]
        lines += [f"the loop at {start} counts once" for start in self.once]
        return "\n".join([table(self), *lines])


def accept(
    code, *, kind, n, k, rows, launch, spills=0, tile_rows=8, known=None, most_blocks=None,
    device=H200,
):  # fmt: skip
    """Judge the kernel of x[rows, k] W[n, k]^T.

    `tile_rows` are the rows that a decoded weight is multiplied with, `known` trips of loops
    without MMAs or around others, `most_blocks` the grid that there could be (else no more than
    there is is asked for).
    """
    trips = trips_for(code, products(code, n, k, rows, tile_rows, launch), known=known)
    times = times_executed(code, trips)
    weights = n * k * math.ceil(rows / tile_rows) / (launch.blocks * launch.threads)
    total, loop = count(code, times)["total"], main_loop(code)
    mmas = sum(n for line, n in zip(code, times, strict=True) if line.family in MMA)
    loop_mmas = sum(line.family in MMA for line in loop)
    failures = rejections(
        code,
        times,
        launch,
        spills=spills,
        weight_bytes=n * k // 2,
        most_blocks=most_blocks or launch.blocks,
        device=device,
    )
    found = Acceptance(
        kind,
        total / weights,
        total / mmas if mmas else None,
        len(loop) * mmas / (loop_mmas * weights) if loop_mmas else None,
        len(loop) / loop_mmas if loop_mmas else None,
        [*failures, *_half_sums(code), *_occupation(launch, rows, device)],
        [loop.start for loop in find_loops(code) if loop.start not in trips],
    )
    return replace(found, failures=[*found.failures, *_beyond(found, code, rows)])


def products(code, n, k, rows, tile_rows, launch):
    """MMAs of a warp of the grid; 0 for a kernel without."""
    shapes = {multiply_adds(line.opcode) for line in code if line.family in MMA}
    if not shapes:
        return 0
    (shape,) = shapes
    padded = math.ceil(rows / tile_rows) * tile_rows
    return math.ceil(n * k * padded / shape / (launch.blocks * launch.warps))


def table(found):
    """The kernel beside published ones of its activations."""
    figures = {
        "this, executed": (found.per_mma, found.per_weight),
        "this, main loop": (found.loop_per_mma, found.loop_per_weight),
    }
    rows = [[name, found.kind, "", *map(_figure, values)] for name, values in figures.items()]
    for name, stick in YARDSTICKS.items():
        if stick.kind.split()[0] == found.kind.split()[0]:
            tile = "x".join(str(x) for x in (stick.rows, stick.columns, stick.k) if x)
            rows.append([name, stick.kind, tile, _figure(stick.per_mma), _figure(stick.per_weight)])
    header = ["kernel", "kind", "rows x columns x k", "instructions per MMA", "per weight"]
    return render_table(header, rows)


def _half_sums(code):
    """Products that are summed in float16."""
    opcodes = {line.opcode for line in code if line.family == "HMMA"}
    return [f"{opcode} sums in float16" for opcode in sorted(opcodes) if ".F16" in opcode]


def _occupation(launch, rows, device):
    """What an SM has of the grid at a time, against the lines."""
    most = min(resident_blocks(launch, device), math.ceil(launch.blocks / device.sms))
    flying, asked = (launch.in_flight or 0) * most, IN_FLIGHT[_column(rows)]
    found = [f"{flying} bytes in flight per SM, of {asked}"] if flying < asked else []
    warps = launch.warps * most
    return found + ([f"{warps} warps per SM, of {WARPS}"] if warps < WARPS else [])


def _beyond(found, code, rows):
    """The lines of instructions that are not kept."""
    column = _column(rows)
    opcodes = {line.opcode for line in code if line.family in MMA}
    shapes = {".".join(opcode.split(".")[:2]) for opcode in opcodes}
    lines = [(found.per_mma, PER_MMA.get(shape, (None,) * 3)[column], shape) for shape in shapes]
    if column < 2:
        most = PER_WEIGHT[found.kind][column]
        lines.append((found.per_weight, most, "weight"))
    return [
        f"{value:.2f} instructions per {of}, of {most}"
        for value, most, of in lines
        if most is not None and value > most
    ]


def _column(rows):
    return 0 if rows <= DECODE else 1 if rows <= FEW_ROWS else 2


def _figure(value):
    return "" if value is None else f"{value:.2f}"
