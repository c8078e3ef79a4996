"""Ranks, similarities and masses, in float64 NumPy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .rows import ProjectionRank, Similarity

FP16_UNIT = 2.0**-11
THRESHOLDS = (1e-4, 1e-3, 5e-3)
EPSILONS = (1e-1, 1e-2, 1e-3)


def projection_rank(name: str, matrix: np.ndarray) -> ProjectionRank:
    """Of W (m, n), from the eigenvalues of its Gram matrix: exact enough at 2⁻¹¹."""
    m, n = matrix.shape
    wide = matrix.astype("float64")
    gram = wide @ wide.T if m <= n else wide.T @ wide
    energy = np.sort(np.maximum(np.linalg.eigvalsh(gram), 0.0))[::-1]
    rank = int((energy > FP16_UNIT**2 * energy[0]).sum())
    share = np.cumsum(energy) / max(energy.sum(), np.finfo("float64").tiny)
    most, nearly = (min(int(np.searchsorted(share, part)) + 1, rank) for part in (0.95, 0.99))
    return ProjectionRank(name, (m, n), rank, most, nearly, m * n / (m + n))


def most_similar(gram: np.ndarray) -> Similarity:
    """The pair of largest |cosine|, of vectors with the inner products `gram` (H, H)."""
    norms = np.sqrt(np.diag(gram))
    outer = np.outer(norms, norms)
    cosine = np.divide(gram, outer, out=np.zeros_like(gram), where=outer > 0)
    np.fill_diagonal(cosine, 0.0)
    if len(cosine) < 2:
        return Similarity(0.0, None)
    first, second = divmod(int(np.abs(cosine).argmax()), len(cosine))
    return Similarity(float(cosine[first, second]), (min(first, second), max(first, second)))


def weight_gram(outputs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """⟨W_o,i W_v,i, W_o,j W_v,j⟩ of all heads; outputs (H, D, N), values (H, D, K)."""
    heads = range(len(outputs))
    gram = np.zeros((len(outputs), len(outputs)))
    for i in heads:
        for j in heads:
            gram[i, j] = np.sum((outputs[i] @ outputs[j].T) * (values[i] @ values[j].T))
    return gram


def attention_maps(
    q: np.ndarray, k: np.ndarray, bias: np.ndarray | None, attrs: Mapping
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax rows (B, H, Sq, Sk), 0 in empty rows, and which cells are visible."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1).astype("float64")
    scores = float(attrs["scale"]) * (q.astype("float64") @ np.swapaxes(k, 2, 3))
    cap = float(attrs["softcap"])
    scores = cap * np.tanh(scores / cap) if cap else scores
    visible = np.broadcast_to(_visible(scores.shape[2], scores.shape[3], attrs), scores.shape)
    if bias is not None and bias.dtype == bool:
        visible = visible & bias
    elif bias is not None:
        scores = scores + bias
        visible = visible & np.broadcast_to(np.isfinite(bias) & (bias > -1e4), scores.shape)
    scores = np.where(visible, scores, -np.inf)
    top = np.where(visible.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0), visible


def _visible(num_queries: int, num_keys: int, attrs: Mapping) -> np.ndarray:
    causal, window = attrs["causal"], int(attrs["window"])
    offset = num_keys - num_queries if causal == "bottom_right" else int(causal or 0)
    i, j = np.arange(num_queries)[:, None] + offset, np.arange(num_keys)
    seen = (j <= i) if causal is not None else np.ones((num_queries, num_keys), bool)
    return seen & (j > i - window) if window else seen


def dropped_mass(maps: np.ndarray, visible: np.ndarray) -> dict[float, tuple[float, float]]:
    """Per threshold: the share of mass in cells below it, and of visible cells above it."""
    total, cells = maps.sum(), max(int(visible.sum()), 1)
    return {
        limit: (
            float(maps[maps < limit].sum() / total) if total else 0.0,
            float((maps >= limit).sum() / cells),
        )
        for limit in THRESHOLDS
    }


def kept_keys(maps: np.ndarray, visible: np.ndarray) -> dict[float, float]:
    """Per ε: the mean share of the visible keys of a row that hold 1 - ε of its mass."""
    rows = maps.reshape(-1, maps.shape[-1])
    counts = visible.reshape(rows.shape).sum(1)
    rows, counts = rows[counts > 0], counts[counts > 0]
    mass = np.cumsum(-np.sort(-rows, axis=1), axis=1)
    needed = {eps: (mass < 1 - eps).sum(1) + 1 for eps in EPSILONS}
    return {eps: float(np.mean(np.minimum(n, counts) / counts)) for eps, n in needed.items()}


def contributions(maps: np.ndarray, v: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """What each head adds to the output: (H, B·Sq, N), for outputs (H, Dv, N)."""
    heads = len(outputs)
    v = np.repeat(v, heads // v.shape[1], axis=1).astype("float64")
    results = np.moveaxis(maps @ v, 1, 0).reshape(heads, -1, v.shape[3])
    return results @ outputs.astype("float64")


def norm_quantiles(out: np.ndarray, residual: np.ndarray) -> dict[str, float]:
    """Of ‖out‖ / ‖residual‖ per token."""
    norms = [
        np.linalg.norm(x.reshape(-1, x.shape[-1]).astype("float64"), axis=1)
        for x in (out, residual)
    ]
    ratio = norms[0] / np.where(norms[1] > 0, norms[1], 1.0)
    return {f"{p}%": float(np.percentile(ratio, p)) for p in (5, 50, 95)}
