"""How far a gradient is from its reference: numbers that do not depend on the loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LIMITS = {"float64": 1e-5, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
# Sums of many terms stray further than the roundings of single values that `noise` holds.
_NOISE_FACTOR = 16.0


@dataclass(frozen=True)
class Measure:
    """One array against its float64 reference.

    Attributes
    ----------
    relative_l2 : float
        ‖got - reference‖ / ‖reference‖; inf where only the reference is zero or got is not finite.
    cosine : float
    max_difference : float
        Largest |got - reference|, in units of the gradient.
    zero_mismatches : int
        Elements that are zero in one of the two and not (beyond noise) in the other.
    leaks : int
        Those of them that are masked: no rounding error explains them.
    """

    relative_l2: float
    cosine: float
    max_difference: float
    zero_mismatches: int
    leaks: int = 0


def measure(
    got: np.ndarray, reference: np.ndarray, limit: float, *, masked: np.ndarray | None = None
) -> Measure:
    """Compare; where `masked` the zeros of the reference must be exact zeros."""
    got = np.asarray(got).astype("float64")
    if not np.isfinite(got).all():
        return Measure(math.inf, math.nan, math.inf, 0)
    difference = got - reference
    size, norm = float(np.linalg.norm(difference)), float(np.linalg.norm(reference))
    relative = size / norm if norm > 0 else (math.inf if size > 0 else 0.0)
    largest = float(np.abs(difference).max(initial=0.0))
    leaked = (
        np.zeros_like(got, "bool") if masked is None else masked & (reference == 0) & (got != 0)
    )
    mismatches = int((_mismatches(got, reference, limit) | leaked).sum())
    return Measure(relative, cosine(got, reference), largest, mismatches, int(leaked.sum()))


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Of the angle between two arrays; NaN if one of them is zero."""
    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(np.vdot(one, other)) / norms if norms > 0 else math.nan


def is_noise(relative_l2: float, limit: float, noise: float) -> bool:
    """Whether rounding every value to its dtype alone explains an error above the limit."""
    return relative_l2 > limit and relative_l2 <= _NOISE_FACTOR * noise


def _mismatches(got: np.ndarray, reference: np.ndarray, limit: float) -> np.ndarray:
    floor = limit * math.sqrt(float(np.mean(reference**2))) if reference.size else 0.0
    lost = (got == 0) & (np.abs(reference) > floor)
    return lost | ((reference == 0) & (np.abs(got) > floor))
