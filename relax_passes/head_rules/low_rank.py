"""The numerical rank of a matrix where it is low enough for two factors to save work.

Most matrices have full rank, so that is proved first, and cheaply: k of the rows are independent
by more than the tolerance where the Cholesky factor of S·Sᵀ - τ²I exists, and then the whole
matrix has rank k at least (singular values of rows interlace those of the matrix).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FACTOR = 4.0
"""Limit of ‖W - A·B‖₂ in unit roundoffs of ‖W‖₂: two factors are rounded, and W itself was."""
_SMALL = 256
_WEAK_ROWS = 128


@dataclass(frozen=True)
class Factors:
    """W ≈ left · right, (m, r) and (r, n), in the dtype of W.

    `residual` is an upper bound of ‖W - left · right‖₂ / ‖W‖₂, from float64.
    """

    left: np.ndarray
    right: np.ndarray
    residual: float


@dataclass
class Screening:
    """Multiply-adds that may still go into proofs that a matrix has no low rank."""

    budget: float = 2e11


def break_even(shape: tuple[int, int]) -> int:
    """The smallest rank at which factors save nothing: r (m + n) ≥ m n."""
    m, n = shape
    return -(-m * n // (m + n))


def low_rank_factors(weight: np.ndarray, unit: float, screening: Screening) -> Factors | str:
    """Factors of fewer elements than `weight` (m, n), equal up to rounding, or why there are none.

    Parameters
    ----------
    unit : unit roundoff u of the dtype that holds the weight
        The rank is the number of singular values above u times the largest, and factors are
        returned only where ‖W - A·B‖₂ ≤ 4·u·‖W‖₂.
    """
    limit = break_even(weight.shape)
    if not np.isfinite(weight.astype("float32")).all():
        return "holds infinite values or NaN"
    if limit <= 1:
        return f"no rank of {weight.shape} saves work"
    if not weight.any():
        zero = np.zeros(1, weight.dtype)
        return Factors(
            np.resize(zero, (len(weight), 1)), np.resize(zero, (1, weight.shape[1])), 0.0
        )
    proved = _independent_rows(weight, limit, unit, screening)
    if proved >= limit:
        return f"rank ≥ {limit}, from where factors save nothing"
    if proved:
        spent = f"the {Screening().budget:.0e} multiply-adds of proofs are spent"
        return f"rank ≥ {proved}; {proved} to {limit - 1} not ruled out: {spent}"
    wide = weight.astype("float64")
    found = _leading_part(wide, limit, unit)
    return found if isinstance(found, str) else _rounded(wide, *found, weight.dtype, unit)


def _independent_rows(weight: np.ndarray, limit: int, unit: float, screening: Screening) -> int:
    """How many rows (columns, of a tall matrix) are proved independent; 0: not proved."""
    rows = weight if weight.shape[0] <= weight.shape[1] else weight.T
    cost = limit**2 * (rows.shape[1] / 2 + limit / 6)
    count = limit
    if cost > screening.budget and limit > _WEAK_ROWS:
        count = _WEAK_ROWS
    else:
        screening.budget -= cost
    chosen = rows[np.linspace(0, len(rows) - 1, count).astype(int)].astype("float64")
    norm = 1.001 * float(np.linalg.norm(weight.astype("float32"))) ** 2
    gram = chosen @ chosen.T
    rounding = 4 * (rows.shape[1] + count) * np.finfo("float64").eps * float(np.trace(gram))
    gram[np.diag_indices(count)] -= unit**2 * norm + rounding
    try:
        np.linalg.cholesky(gram)
    except np.linalg.LinAlgError:
        return 0
    return count


def _leading_part(wide: np.ndarray, limit: int, unit: float) -> tuple[np.ndarray, np.ndarray] | str:
    """Two float64 factors of the singular values above u of the largest, or the rank."""
    m, n = wide.shape
    size = min(m, n) if min(m, n) <= _SMALL else 32
    random = np.random.default_rng(0)
    while True:
        basis = np.eye(m) if size >= m else _range_of(wide, size, random)
        u, s, vt = np.linalg.svd(basis.T @ wide, full_matrices=False)
        rank = int((s > unit * s[0]).sum())
        if rank >= limit:
            return f"rank {rank} of {min(m, n)}; factors save work below {limit}"
        root = np.sqrt(s[:rank])
        left, right = basis @ u[:, :rank] * root, root[:, None] * vt[:rank]
        if size >= min(m, n) or spectral_bound(wide - left @ right) <= 2 * unit * s[0]:
            return left, right
        size *= 2


def _range_of(wide: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(wide @ random.standard_normal((wide.shape[1], size)))[0]


def spectral_bound(matrix: np.ndarray) -> float:
    """An upper bound of ‖M‖₂, at most rank(M)^(1/16) of it: ‖(MᵀM)⁴‖_F^(1/8)."""
    scale = float(np.abs(matrix).max())
    if scale == 0:
        return 0.0
    small = matrix / scale
    gram = small @ small.T if small.shape[0] <= small.shape[1] else small.T @ small
    size = float(np.linalg.norm(gram))
    power = gram / size
    for _ in range(2):
        power = power @ power
    return scale * (size * float(np.linalg.norm(power)) ** 0.25) ** 0.5


def _rounded(
    wide: np.ndarray, left: np.ndarray, right: np.ndarray, dtype: np.dtype, unit: float
) -> Factors | str:
    a, b = left.astype(dtype), right.astype(dtype)
    norm = float(np.linalg.norm(left, 2)) * float(np.linalg.norm(right, 2))
    residual = spectral_bound(wide - a.astype("float64") @ b.astype("float64")) / norm
    if residual > FACTOR * unit:
        return (
            f"rank {left.shape[1]}, but ‖W - A·B‖₂ ≤ {residual:.1e}·‖W‖₂ is all that can be "
            f"proved in {dtype}, over {FACTOR * unit:.1e}"
        )
    return Factors(a, b, residual)
