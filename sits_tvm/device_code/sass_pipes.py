"""What machine instructions ask of a streaming multiprocessor (SM) of sm_80 and sm_90.

Sources of the rates below:

- [BPG] CUDA C++ Best Practices Guide, "Throughput of Native Arithmetic Instructions" (in the
  Programming Guide up to CUDA 12): results per clock and SM for compute capability 8.0 and 9.0.
- [WP] NVIDIA's A100 and H100 architecture whitepapers: 4 schedulers with one warp instruction per
  clock each, 32 load/store units, 1024 and 2048 dense FP16 multiply-adds per clock in tensor cores.
- [PIPES] NVIDIA on its developer forum (topic 302018): IMAD, IDP and FP32 share the FMA pipe of
  GA100; of GH100 only its heavy half does IMAD and IDP, both halves do FP32 and FP16x2.
- [VLLM] vllm-project/vllm, pull request 7174: mma.sync reaches at best about 75 % of the peak of
  Hopper's tensor cores, which is that of wgmma.
- [OURS] No figure is published; what we take.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .sass import Instruction
from .sass_loops import MMA

WARP = 32
PER_SCHEDULER = ("issue", "alu", "fma", "fma_heavy", "half", "xu", "fp64", "tensor")
"""Pipes that each of the 4 schedulers of an SM has a quarter of; the others serve all of them."""

_KINDS = {
    "integer": "LOP LOP3 PLOP3 SHF SHL SHR IADD IADD3 VIADD VIADDMNX VIADDMNMX IMNMX VIMNMX PRMT "
    "ISETP SEL LEA BMSK SGXT IABS MOV P2R R2P VABSDIFF VABSDIFF4 VOTE FSEL FSETP FMNMX HMNMX2 "
    "HSETP2",
    "float": "FFMA FMUL FADD",
    "multiply": "IMAD IDP",
    "half": "HADD2 HFMA2 HMUL2",
    "convert": "I2F F2I F2F FRND MUFU POPC FLO BREV I2I",
    "pack": "F2FP I2FP I2IP F2IP",
    "double": "DFMA DADD DMUL DSETP",
    "memory": "LDS LDSM STS STSM LDG LDGSTS LD ST STG LDL STL RED REDG ATOM ATOMG ATOMS",
    "shuffle": "SHFL",
    "issue": "BRA EXIT RET CALL BSSY BSYNC BREAK BAR WARPSYNC DEPBAR LDGDEPBAR MEMBAR ERRBAR FENCE "
    "CCTL NOP YIELD NANOSLEEP LDC S2R S2UR CS2R R2UR B2R WARPGROUP CGAERRBAR BMOV",
    "uniform": "ULDC UMOV UIADD3 ULEA ULOP3 USHF UISETP UIMAD USEL UPRMT UFLO UPOPC USGXT UPLOP3 "
    "VOTEU UBMSK",
}
_KIND = {family: kind for kind, families in _KINDS.items() for family in families.split()}
# Lanes per clock and SM by pipe; [BPG] where no other source is named. A warp has 32.
_LANES: dict[str, dict[str, dict[str, int]]] = {
    "sm_80": {
        "integer": {"alu": 64},
        "float": {"fma": 64},
        "multiply": {"fma": 64},  # [PIPES]
        "half": {"half": 128},  # 256 results, two a lane
        "convert": {"xu": 16},
        "pack": {"alu": 64},  # [OURS]
        "double": {"fp64": 32},
        "memory": {"lsu": 32},  # [WP]
        "shuffle": {"lsu": 32},
        "issue": {},
        "uniform": {},  # [OURS] for issue only
    },
    "sm_90": {
        "integer": {"alu": 64},
        "float": {"fma": 128},
        "multiply": {"fma": 128, "fma_heavy": 64},  # [PIPES]
        "half": {"fma": 128},  # [PIPES] 256 results, two a lane
        "convert": {"xu": 16},
        "pack": {"alu": 64},  # [OURS]
        "double": {"fp64": 64},
        "memory": {"lsu": 32},  # [WP]
        "shuffle": {"lsu": 32},
        "issue": {},
        "uniform": {},  # [OURS] for issue only
    },
}
MEMORY_BYTES = 128
"""Per clock and SM of L1 and shared memory: 32 banks of 4 bytes [BPG]."""

_ISSUE = 128  # lanes: 4 warp instructions per clock and SM [WP]
# Dense multiply-adds per clock and SM [WP]. FP8 and INT8 are equal.
_MULTIPLY_ADDS = {
    "sm_80": {"tf32": 512, "16-bit": 1024, "8-bit": 2048, "4-bit": 4096},
    "sm_90": {"tf32": 1024, "16-bit": 2048, "8-bit": 4096},
}
_MMA_SYNC = {"sm_80": 1.0, "sm_90": 0.75}  # share of that rate [VLLM]
_GLOBAL_LOADS = ("LDG", "LD")
_COPIES = ("LDGSTS",)
_GLOBAL_STORES = ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG")
_DTYPES = {"HMMA": "16-bit", "HGMMA": "16-bit", "IMMA": "8-bit", "IGMMA": "8-bit", "QGMMA": "8-bit"}
_WIDTHS = {"tf32": 4, "16-bit": 2, "8-bit": 1}
"""Bytes of an element of the right factor of GMMAs, which they read from shared memory (PTX ISA,
"Asynchronous Warpgroup Level Matrix Multiply-Accumulate Operations")."""


@dataclass(frozen=True)
class Demand:
    """What one warp asks of an SM.

    Attributes
    ----------
    instructions : int
        A thread's, of any kind.
    cycles : dict of str to float
        By pipe: clocks that the SM would need for one warp if it had nothing else to do. "issue"
        is the schedulers, "lsu" the load/store units by instruction, "l1" the data of L1 and shared
        memory, without bank conflicts and broadcasts, and without asynchronous copies.
    loaded, copied, stored : int
        Bytes of global memory, of all lanes; `copied` asynchronously to shared memory.
    unknown : dict of str to int
        Opcodes that no pipe is known for, counted for "issue" only.
    """

    instructions: int
    cycles: dict[str, float]
    loaded: int
    copied: int
    stored: int
    unknown: dict[str, int]


def demand(opcodes: Mapping[str, int], arch: str) -> Demand:
    """The demand of a warp whose threads execute so many of each full opcode.

    Raises
    ------
    ValueError
        For an architecture other than sm_80, sm_90 and sm_90a.
    """
    known = arch.rstrip("a")
    if known not in _LANES:
        raise ValueError(f"no rates of {arch!r} are known; there are {', '.join(_LANES)}")
    cycles: defaultdict[str, float] = defaultdict(float)
    unknown: dict[str, int] = {}
    for opcode, times in opcodes.items():
        cycles["issue"] += times * WARP / _ISSUE
        spent = _cycles(opcode, known)
        if spent is None:
            unknown[opcode] = times
        for pipe, clocks in (spent or {}).items():
            cycles[pipe] += times * clocks
    return Demand(
        instructions=sum(opcodes.values()),
        cycles=dict(cycles),
        loaded=_bytes(opcodes, _GLOBAL_LOADS),
        copied=_bytes(opcodes, _COPIES),
        stored=_bytes(opcodes, _GLOBAL_STORES),
        unknown=unknown,
    )


def opcode_counts(instructions: Sequence[Instruction], times: Sequence[int]) -> dict[str, int]:
    """How often a thread executes each full opcode; `times` from `times_executed`."""
    counts: Counter[str] = Counter()
    for line, n in zip(instructions, times, strict=True):
        if n and line.opcode != "NOP":
            counts[line.opcode] += n
    return dict(counts)


def width(opcode: str) -> int:
    """Bytes that an access to memory moves per thread."""
    matrices = re.search(r"\.MT?88(?:\.([24]))?$", opcode)
    if matrices:
        return 4 * int(matrices[1] or 1)
    bits = re.search(r"\.[USB]?(8|16|64|128|256)(?=\.|$)", opcode)
    return int(bits[1]) // 8 if bits else 4


def multiply_adds(opcode: str) -> int | None:
    """Of an MMA instruction, per warp; None for a shape that is not known (sparse ones too)."""
    group = re.search(r"\.(\d+)x(\d+)x(\d+)(?=\.|$)", opcode)
    if group:
        return int(group[1]) * int(group[2]) * int(group[3]) // 4  # a warpgroup is 4 warps
    shape = re.match(r"\w+\.(8|16)8(4|8|16|32|64|128|256)(?=\.|$)", opcode)
    return int(shape[1]) * 8 * int(shape[2]) if shape else None


def _cycles(opcode: str, arch: str) -> dict[str, float] | None:
    """Clocks of an SM per warp instruction, by pipe; None if they are not known."""
    family = opcode.partition(".")[0]
    if family in MMA:
        return _tensor_cycles(opcode, family, arch)
    if family not in _KIND:
        return None
    spent = {pipe: WARP / lanes for pipe, lanes in _LANES[arch][_KIND[family]].items()}
    if _KIND[family] == "memory" and family not in _COPIES:
        spent["l1"] = WARP * max(width(opcode), 4) / MEMORY_BYTES
    return spent


def _tensor_cycles(opcode: str, family: str, arch: str) -> dict[str, float] | None:
    dtype = _DTYPES.get(family)
    if ".TF32" in opcode:
        dtype = "tf32"
    elif re.search(r"\.[SU]4(?=\.|$)", opcode):
        dtype = "4-bit"
    products, rate = multiply_adds(opcode), _MULTIPLY_ADDS[arch].get(dtype or "")
    if products is None or rate is None or dtype is None:
        return None
    if "GMMA" not in family:
        return {"tensor": products / rate / _MMA_SYNC[arch]}
    return {"tensor": products / rate, "l1": _shared_factor(opcode, dtype) / MEMORY_BYTES}


def _shared_factor(opcode: str, dtype: str) -> float:
    """Bytes of the right factor of a product of a warpgroup, a warp's quarter of them."""
    shape = re.search(r"\.\d+x(\d+)x(\d+)(?=\.|$)", opcode)
    assert shape is not None
    return int(shape[1]) * int(shape[2]) * _WIDTHS[dtype] / 4


def _bytes(opcodes: Mapping[str, int], families: Sequence[str]) -> int:
    """That a warp moves with these instructions."""
    return sum(
        times * WARP * width(opcode)
        for opcode, times in opcodes.items()
        if opcode.partition(".")[0] in families
    )
