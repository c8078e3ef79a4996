"""The loops of a kernel in machine code, and how often a thread executes each instruction.

A loop is what its control flow says (a natural loop: one way in, at its first instruction), not
where a branch goes back to. Three things are taken as given: a call returns, and the routine is
not part of the kernel; a warp is converged (BRA.DIV, the way of a warp that is not, is never taken,
BRA.CONV always); and what no path from the first instruction leads to, is not executed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .sass import Instruction, count

MMA = ("HMMA", "IMMA", "DMMA", "BMMA", "HGMMA", "IGMMA", "QGMMA")
"""Families of instructions for tensor cores."""

# A call counts as arithmetic: it is how an emulated MMA looks from a loop.
_MATH = (*MMA, "FFMA", "HFMA2", "IDP", "DFMA", "CALL")
_BYTES = 16  # of an instruction, since sm_70
_INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")
_ENDS = ("EXIT", "RET", "BRA", "JMP", "KILL", *_INDIRECT)

Graph = list[list[int]]
"""By index of an instruction."""


@dataclass(frozen=True)
class Loop:
    """The index of the first instruction, and of all that is repeated, inner loops included."""

    start: int
    body: frozenset[int]

    def is_inside(self, outer: Loop) -> bool:
        return self.body < outer.body


def find_loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """Every loop that can be reached, in the order of their first instructions."""
    flow = _successors(instructions)
    before = _predecessors(flow)
    bodies: dict[int, frozenset[int]] = {}
    for start, sources in enumerate(before):
        for source in sources if len(sources) > 1 or start == 0 else ():
            body = _natural_loop(before, start, source)
            if body:
                bodies[start] = bodies.get(start, frozenset()) | body
    return [Loop(start, body) for start, body in bodies.items()]


def main_loop(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The body of the innermost loop that multiplies, of several the one with most to do.

    A loop without multiplications (a wait, a copy) does not make the loop around it an outer one.
    Empty for a kernel without such a loop.
    """
    math = {index for index, line in enumerate(instructions) if line.family in _MATH}
    loops = [loop for loop in find_loops(instructions) if loop.body & math]
    innermost = [loop for loop in loops if not any(other.is_inside(loop) for other in loops)]
    if not innermost:
        return []
    best = max(innermost, key=lambda loop: len(loop.body & math))
    return [instructions[index] for index in sorted(best.body)]


def times_executed(
    instructions: Sequence[Instruction], trips: Mapping[int, int] | None = None
) -> list[int]:
    """How often a thread executes each instruction at most.

    Parameters
    ----------
    trips : mapping of int to int
        By a loop's `start`: how often that instruction runs each time the loop is entered.
        Loops that are not named run once.

    Returns
    -------
    list of int
        The product of the trips of all loops around an instruction; 0 where nothing leads to. A
        branch forward is taken to skip nothing, and a predicate to be true.

    Raises
    ------
    ValueError
        If the control flow is not known (an indirect branch), or has a cycle with two ways in;
        if a trip names no loop.
    """
    loops, flow = find_loops(instructions), _successors(instructions)
    _check_flow(instructions, flow, loops)
    if unknown := set(trips or {}) - {loop.start for loop in loops}:
        raise ValueError(f"no loop starts at {sorted(unknown)}; loops: {[x.start for x in loops]}")
    reached = _reached(flow)
    times = [int(index in reached) for index in range(len(instructions))]
    for loop in loops:
        for index in loop.body:
            times[index] *= (trips or {}).get(loop.start, 1)
    return times


def executed(
    instructions: Sequence[Instruction], trips: Mapping[int, int] | None = None
) -> dict[str, int]:
    """What a thread executes at most, by full opcode and class as in `count`.

    `trips` and errors as for `times_executed`.
    """
    return count(instructions, times_executed(instructions, trips))


def trips_for(
    instructions: Sequence[Instruction],
    total: int,
    of: str | Sequence[str] = MMA,
    known: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Trips of the loops that make a thread execute `total` instructions that start with `of`.

    The compiler unrolls loops, splits them in an unrolled one and one for the rest, and moves
    steps in front of them, so that trips of a loop of the source say little; how many products a
    warp has to compute, it cannot change. Instructions `of` outside loops are taken as executed;
    of several loops the one with most of them per trip runs as often as fits, then the next one,
    as after a split, and the last one is rounded up. A test at the top of a loop, which runs once
    more than the rest of it, counts as often as the rest.

    Parameters
    ----------
    known : mapping of int to int, optional
        Trips of other loops, by `start`. Needed of a loop around one that is to be found.

    Returns
    -------
    dict of int to int
        `known`, and those that were found. Loops without an instruction `of` are not in it.

    Raises
    ------
    ValueError
        If loops with instructions `of` lie in one another; if without a loop there are fewer than
        `total`; and as `times_executed`.
    """
    prefixes = (of,) if isinstance(of, str) else tuple(of)
    trips = dict(known or {})
    once = times_executed(instructions, trips)
    wanted = [index for index, line in enumerate(instructions) if _starts(line, prefixes)]
    loops = [loop for loop in find_loops(instructions) if loop.start not in trips]
    loops = [loop for loop in loops if not loop.body.isdisjoint(wanted)]
    for outer in loops:
        if any(inner.is_inside(outer) for inner in loops):
            message = f"the loop at {outer.start} is around another with {'/'.join(prefixes)}"
            raise ValueError(f"{message}: its trips must be known")
    inside = frozenset[int]().union(*(loop.body for loop in loops))
    left = total - sum(once[index] for index in wanted if index not in inside)
    if left > 0 and not loops:
        found = total - left
        raise ValueError(f"{total} {'/'.join(prefixes)} wanted; {found} are there, outside loops")
    sizes = {loop: sum(once[index] for index in wanted if index in loop.body) for loop in loops}
    for number, (loop, size) in enumerate(sorted(sizes.items(), key=lambda x: -x[1]), 1):
        share = max(left, 0) / size
        trips[loop.start] = math.ceil(share) if number == len(loops) else math.floor(share)
        left -= trips[loop.start] * size
    return trips


def executed_for(
    instructions: Sequence[Instruction],
    total: int,
    of: str | Sequence[str] = MMA,
    known: Mapping[int, int] | None = None,
) -> dict[str, int]:
    """What a thread executes that does `total` instructions `of`: `executed` with `trips_for`."""
    return executed(instructions, trips_for(instructions, total, of, known))


def _starts(line: Instruction, prefixes: Sequence[str]) -> bool:
    """Whether an opcode is one of `prefixes` or goes on after it with a dot."""
    return any(f"{line.opcode}.".startswith(f"{prefix}.") for prefix in prefixes)


def _successors(instructions: Sequence[Instruction]) -> Graph:
    """Where control goes from each instruction."""
    flow: Graph = []
    for index, line in enumerate(instructions):
        diverged = line.opcode.startswith("BRA.DIV")
        ends = line.family in _ENDS and not diverged and not _is_conditional(line)
        after = [] if ends else [index + 1]
        if line.family in ("BRA", "BSSY", "WARPSYNC") and not diverged:
            target = re.search(r"0x([0-9a-f]+)$", line.operands)
            after += [int(target[1], 16) // _BYTES] if target else []
        flow.append(sorted({to for to in after if to < len(instructions)}))
    return flow


def _is_conditional(line: Instruction) -> bool:
    """By a predicate before the opcode or among the operands."""
    return bool(line.predicate or re.search(r"(^|,)!?U?P\d", line.operands))


def _reached(flow: Graph) -> set[int]:
    """Those that a path from the first instruction leads to."""
    seen, new = set(), [0] if flow else []
    while new:
        index = new.pop()
        if index not in seen:
            seen.add(index)
            new += flow[index]
    return seen


def _predecessors(flow: Graph) -> Graph:
    """Of those that can be reached."""
    before: Graph = [[] for _ in flow]
    for index in sorted(_reached(flow)):
        for after in flow[index]:
            before[after].append(index)
    return before


def _natural_loop(before: Graph, start: int, source: int) -> frozenset[int]:
    """What the edge from `source` back to `start` repeats; empty if there is a way around `start`
    to `source`, so that the edge closes no loop."""
    body, new = {start}, [source]
    while new:
        index = new.pop()
        if index not in body:
            body.add(index)
            new += before[index]
    return frozenset(body) if start == 0 or 0 not in body else frozenset()


def _check_flow(instructions: Sequence[Instruction], flow: Graph, loops: Sequence[Loop]) -> None:
    """ValueError unless every cycle is one of `loops`."""
    reached = _reached(flow)
    indirect = [line.opcode for i, line in enumerate(instructions) if line.family in _INDIRECT]
    if indirect:
        raise ValueError(f"{indirect[0]} goes where the machine code does not say")
    bodies = {loop.start: loop.body for loop in loops}
    forward = {i: [to for to in flow[i] if i not in bodies.get(to, ())] for i in reached}
    entries = Counter(after for index in reached for after in forward[index])
    ready = [index for index in reached if not entries[index]]
    done = 0
    while ready:
        done += 1
        for after in forward[ready.pop()]:
            entries[after] -= 1
            ready += [after] if not entries[after] else []
    if done < len(reached):
        first = min(index for index in reached if entries[index])
        raise ValueError(f"the control flow at {first} has a cycle with more than one way in")
