"""Count the machine instructions of each kernel in a cubin."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CLASSES = ("HMMA", "IMMA", "HGMMA", "IGMMA", "FFMA", "LOP3", "CALL", "LDL", "STL")
"""Instruction classes that every count has a total for, be it 0."""

# A call counts as arithmetic: it is how an emulated MMA looks from a loop.
_MATH = ("HMMA", "IMMA", "HGMMA", "IGMMA", "QGMMA", "FFMA", "HFMA2", "IDP", "DFMA", "CALL")
_BYTES = 16  # of an instruction, since sm_70


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: its full opcode, and its operands as text."""

    opcode: str
    operands: str

    @property
    def family(self) -> str:
        return self.opcode.partition(".")[0]


def disassemble(nvdisasm: Path, cubin: Path) -> dict[str, list[Instruction]]:
    """The instructions of every kernel in a cubin, routines that it calls included.

    Raises
    ------
    subprocess.CalledProcessError
        If nvdisasm does not understand the file.
    """
    done = subprocess.run(
        [str(nvdisasm), "-json", str(cubin)], capture_output=True, text=True, check=True
    )
    _, functions = json.loads(done.stdout)
    return {
        function["function-name"]: [
            Instruction(line["opcode"], line.get("operands", ""))
            for line in function["sass-instructions"]
        ]
        for function in functions
    }


def count(instructions: Sequence[Instruction]) -> dict[str, int]:
    """How often each full opcode occurs, and totals.

    The totals are "total" (padding left out), those of `CLASSES`, "LDG.128" for loads from
    global memory of at least 16 bytes per thread, "LDG.narrow" for the others (both count
    LDGSTS, the asynchronous copies to shared memory), and "CALL:<routine>" per routine called.
    """
    counts = Counter(line.opcode for line in instructions if line.opcode != "NOP")
    totals = Counter(line.family for line in instructions)
    loads = [line.opcode for line in instructions if line.family in ("LDG", "LDGSTS")]
    wide = sum(bool(re.search(r"\.(128|256)\b", opcode)) for opcode in loads)
    routines = Counter(_routine(line) for line in instructions if line.family == "CALL")
    return {
        "total": counts.total(),
        **{name: totals[name] for name in CLASSES},
        "LDG.128": wide,
        "LDG.narrow": len(loads) - wide,
        **{f"CALL:{name}": times for name, times in sorted(routines.items())},
        **{name: times for name, times in sorted(counts.items()) if name not in CLASSES},
    }


def main_loop(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The body of the innermost loop that multiplies, of several the one with most to do.

    A loop without multiplications (a wait, a copy) does not make the loop around it an outer one.
    Empty for a kernel without such a loop.
    """
    loops = [loop for loop in _loops(instructions) if _math(instructions, loop)]
    innermost = [loop for loop in loops if not any(_inside(other, loop) for other in loops)]
    if not innermost:
        return []
    best = max(innermost, key=lambda loop: _math(instructions, loop))
    return list(instructions[best.start : best.stop])


def _loops(instructions: Sequence[Instruction]) -> list[range]:
    """Where a branch goes back to: first to last instruction."""
    loops: dict[int, range] = {}
    for index, line in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)$", line.operands)
        if line.family == "BRA" and target:
            start = int(target[1], 16) // _BYTES
            if start < index:
                loops[start] = range(start, index + 1)  # several ways back: the last one
    return list(loops.values())


def _math(instructions: Sequence[Instruction], loop: range) -> int:
    return sum(instructions[index].family in _MATH for index in loop)


def _inside(inner: range, outer: range) -> bool:
    return inner != outer and outer.start <= inner.start and inner.stop <= outer.stop


def _routine(line: Instruction) -> str:
    return line.operands.rpartition("$")[2] or line.operands
