"""A product with a 4-bit weight, and an implementation of it, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tvm

from sits_tvm.config import QuantSpec

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 3e-2}
"""Relative L2 error by the dtype that a kernel rounds its operands to.

For x with normal distribution, int8 is off by max|x| / 127 / sqrt(12): 1 % where a token of 4096
has one scale.
"""


@dataclass(frozen=True)
class Case:
    """y (m, n) = x (m, k) @ w (n, k).T in each of `layers` layers, which lie apart in memory.

    The layers hold the same values, in tensors of their own.
    """

    m: int
    n: int
    k: int
    spec: QuantSpec
    layers: int
    threads: int

    @property
    def name(self) -> str:
        return f"M={self.m} K={self.k} N={self.n} g{self.spec.group_size}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.layers

    @cached_property
    def x(self) -> np.ndarray:
        return np.random.default_rng(1).standard_normal((self.m, self.k), "float32")

    @cached_property
    def codes(self) -> np.ndarray:
        return np.random.default_rng(2).integers(0, 16, (self.n, self.k), "uint8")

    @cached_property
    def scale(self) -> np.ndarray:
        rng = np.random.default_rng(3)
        return rng.uniform(0.005, 0.01, self._groups).astype(self.spec.scale_dtype)

    @cached_property
    def zero_point(self) -> np.ndarray:
        if self.spec.symmetric:
            return np.full(self._groups, 8, "uint8")
        return np.random.default_rng(4).integers(0, 16, self._groups, "uint8")

    @property
    def _groups(self) -> tuple[int, int]:
        return self.n, -(-self.k // self.spec.group_size)

    @cached_property
    def weight(self) -> np.ndarray:
        """w in float32, exactly."""
        zero, scale = (
            part.astype("float32").repeat(self.spec.group_size, 1)[:, : self.k]
            for part in (self.zero_point, self.scale)
        )
        return (self.codes.astype("float32") - zero) * scale

    def error(self, y: np.ndarray) -> float:
        """Relative L2 error of some rows of `y`; NaN if any element is not finite."""
        if not np.isfinite(y).all():
            return float("nan")
        rows = np.linspace(0, self.m - 1, min(self.m, 8)).astype(int)
        exact = self.x[rows].astype("float64") @ self.weight.T.astype("float64")
        return float(np.linalg.norm(y[rows] - exact) / np.linalg.norm(exact))


class NotMeasured(Exception):
    """Why a peer does not take part in a case."""


@dataclass(frozen=True)
class Kernel:
    """All layers of a case, once: what is timed."""

    run: Callable[[], object]
    result: Callable[[], np.ndarray]
    rounds_to: str
    """The dtype of `TOLERANCE` that its operands are rounded to."""
    nbytes: int = 0
    """Of the weights of a layer."""
    peak: str = ""
    """The instruction that bounds it, of those that `cpu_limits.peak` knows."""
    codes: Sequence[tvm.runtime.Tensor] = ()
    """The INT4 codes of each layer, of a kernel of ours."""
