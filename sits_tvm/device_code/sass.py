"""Count the machine instructions of each kernel in a cubin."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

CLASSES = ("HMMA", "IMMA", "HGMMA", "IGMMA", "FFMA", "LOP3", "CALL", "LDL", "STL")
"""Instruction classes that every count has a total for, be it 0."""


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: its full opcode, its operands as text, and its predicate ("@!P0")."""

    opcode: str
    operands: str
    predicate: str = ""

    @property
    def family(self) -> str:
        """The opcode up to its first dot; "BRA" for a call of a bare address, by which ptxas leaves
        some loops: calls of routines name these.
        """
        if self.opcode.startswith("CALL") and re.fullmatch(r"0x[0-9a-f]+", self.operands):
            return "BRA"
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
            Instruction(line["opcode"], line.get("operands", ""), line.get("predicate", ""))
            for line in function["sass-instructions"]
        ]
        for function in functions
    }


def count(
    instructions: Sequence[Instruction], times: Sequence[int] | None = None
) -> dict[str, int]:
    """How often each full opcode occurs, and totals; each instruction counts `times`, or once.

    The totals are "total" (padding left out), those of `CLASSES`, "LDG.128" for loads from
    global memory of at least 16 bytes per thread, "LDG.narrow" for the others (both count
    LDGSTS, the asynchronous copies to shared memory), and "CALL:<routine>" per routine called.
    """
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    routines: Counter[str] = Counter()
    for line, n in zip(instructions, repeat(1) if times is None else times, strict=False):
        counts[line.opcode] += n
        totals[line.family] += n
        if line.family in ("LDG", "LDGSTS"):
            totals["wide" if re.search(r"\.(128|256)\b", line.opcode) else "narrow"] += n
        if line.family == "CALL":
            routines[_routine(line)] += n
    del counts["NOP"]
    return {
        "total": counts.total(),
        **{name: totals[name] for name in CLASSES},
        "LDG.128": totals["wide"],
        "LDG.narrow": totals["narrow"],
        **{f"CALL:{name}": n for name, n in sorted(routines.items())},
        **{name: n for name, n in sorted(counts.items()) if name not in CLASSES},
    }


def _routine(line: Instruction) -> str:
    return line.operands.rpartition("$")[2] or line.operands
