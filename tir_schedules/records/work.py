"""What a kernel has to do, as far as its machine code does not say it: for the static model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """The work of a kernel that multiplies, and of one that adds up its parts, if there is one.

    Attributes
    ----------
    multiply_adds : int
        Of a warp, on tensor cores; padded rows, columns and k count.
    opcodes : mapping of str to int
        What a thread executes at least, by full opcode.
    blocks, threads, registers, shared : int
        Of the launch; registers per thread and bytes of shared memory per block, both at least.
    hbm_bytes : int
        That memory must deliver or take at least, each byte once.
    weight_bytes : int
        Of the codes of the weight.
    copied : int
        Bytes that the asynchronous copies of a block move at most.
    in_flight : int
        Bytes of the weight that a block has under way at any time.
    output_bytes : int
        That the kernel that adds up parts writes; 0: there is none.
    partial_bytes : int
        Of the parts, which the first kernel writes and that one reads.
    """

    multiply_adds: int
    opcodes: Mapping[str, int]
    blocks: int
    threads: int
    registers: int
    shared: int
    hbm_bytes: int
    weight_bytes: int
    copied: int
    in_flight: int
    output_bytes: int
    partial_bytes: int = 0
