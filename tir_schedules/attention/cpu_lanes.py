"""Lanes of the vectors of the CPU kernels: cutting axes into them, and joining them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from ..emit import LANES, int64, serial, vectorized
from .cpu_scores import float32


def along(width: int, vectors: int) -> Iterator[tuple[tirx.Expr, int]]:
    """First index and lanes of pieces of an axis: many vectors at a time, then 16, 8, 4, 2, 1."""
    step = vectors * LANES
    if width >= step:
        with serial(width // step) as block:
            yield block * step, step
    first = width - width % step
    for lanes in (LANES, 8, 4, 2, 1):
        while width - first >= lanes:
            yield int64(first), lanes
            first += lanes


@contextmanager
def each_vector(extent: int) -> Iterator[tirx.Expr]:
    with serial(extent // LANES) as block, vectorized() as lane:
        yield block * LANES + lane


def folded(lanes: tirx.Buffer, join: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> tirx.Expr:
    """All 16 lanes in one, by halves; `lanes` is overwritten."""
    half = LANES // 2
    while half:
        with vectorized(half) as lane:
            T.buffer_store(lanes, join(lanes[lane], lanes[lane + half]), [lane])
        half //= 2
    return lanes[int64(0)]


def set_lanes(
    target: tirx.Buffer, value: Callable[[tirx.Expr], tirx.Expr], lanes: int = LANES
) -> None:
    with vectorized(lanes) as lane:
        T.buffer_store(target, value(lane), [lane])


def clear(buffer: tirx.Buffer) -> None:
    with serial(buffer.shape[0]) as i:
        T.buffer_store(buffer, float32(0.0), [i])
