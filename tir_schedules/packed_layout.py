"""Shapes, dtypes and code ranges of the INT4 weight format that `packing` defines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sits_tvm.config import QuantSpec

CODES_PER_WORD = 8
SYMMETRIC_ZERO = 8
"""The zero point of symmetric codes, of any width: signed codes are stored with 8 added."""


@dataclass(frozen=True)
class PackedLayout:
    """Shapes and dtypes of a packed weight W[n, k]."""

    n: int
    k: int
    spec: QuantSpec
    lanes: int = 1

    @property
    def group_size(self) -> int:
        """Elements per group as stored: per-channel groups are padded to whole words."""
        return (
            round_up(self.k, CODES_PER_WORD) if self.spec.group_size == -1 else self.spec.group_size
        )

    @property
    def groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def padded_k(self) -> int:
        return self.groups * self.group_size

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes of (codes, scale) or, when asymmetric, (codes, scale, zero point)."""
        rows = -(-self.n // self.lanes)
        widths = [self.padded_k // CODES_PER_WORD, self.groups]
        if not self.spec.symmetric:
            widths.append(-(-self.groups // CODES_PER_WORD))
        return tuple((rows, width, self.lanes) for width in widths)

    @property
    def names(self) -> tuple[str, ...]:
        return ("codes", "scale", "zero_point")[: len(self.shapes)]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("uint32", self.spec.scale_dtype, "uint32")[: len(self.shapes)]

    @property
    def nbytes(self) -> int:
        sizes = (
            np.prod(s) * np.dtype(d).itemsize for s, d in zip(self.shapes, self.dtypes, strict=True)
        )
        return int(sum(sizes))


def code_range(spec: QuantSpec) -> tuple[int, int]:
    """The smallest and the largest code: 0…15 for 4 bits; symmetric 3 bits are 4…11 around 8."""
    levels = 1 << spec.bits
    low = SYMMETRIC_ZERO - levels // 2 if spec.symmetric else 0
    return low, low + levels - 1


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
