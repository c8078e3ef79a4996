"""Which heads are the same head, written down differently.

The scores of a head are q·k, so they stay as they are, exactly, when a row of q is multiplied by a
power of two or by -1 and that of k by its inverse, and when both are permuted alike. Likewise the
rows of v and the columns of the output projection. Heads that agree after these are put into one
form agree in every bit of what they compute, up to the order of their sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .attention_projections import HeadTrace
from .selection import LINEAR, VIEW


@dataclass(frozen=True)
class ValueForm:
    """The rows of a value head in one form: row i is `rows[order[i]] / scale[order[i]]`."""

    key: bytes
    order: np.ndarray
    scale: np.ndarray


def map_keys(
    queries: Sequence[list[np.ndarray]], keys: Sequence[list[np.ndarray]], kind: int
) -> list[bytes]:
    """Per head, what is equal for heads of equal attention maps.

    Parameters
    ----------
    queries, keys : the leaves of each query head and of the key head it reads, (rows, n) each
    kind : int
        VIEW: nothing lies between weights and scores, rows may differ by signs, powers of two and
        order. LINEAR (rotary embedding): by one factor for the whole head. OTHER: not at all.
    """
    signatures = [_signature(q) + _signature(k) for q, k in zip(queries, keys, strict=True)]
    found = []
    for head, (q, k) in enumerate(zip(queries, keys, strict=True)):
        alone = signatures.count(signatures[head]) == 1 or not is_finite([*q, *k])
        found.append(b"head %d" % head if alone else _digest(_map_form(q, k, kind)))
    return found


def value_forms(values: Sequence[list[np.ndarray]], kind: int) -> list[ValueForm]:
    """Per key/value head, its rows in one form."""
    signatures = [_signature(v) for v in values]
    found = []
    for head, v in enumerate(values):
        rows = len(v[0])
        form = ValueForm(b"head %d" % head, np.arange(rows), np.ones(rows))
        if signatures.count(signatures[head]) > 1 and is_finite(v):
            form = _value_form(v, kind)
        found.append(form)
    return found


def kind_of(*traces: HeadTrace) -> int:
    """The least free of their kinds."""
    return max(trace.kind for trace in traces)


def _map_form(q: list[np.ndarray], k: list[np.ndarray], kind: int) -> np.ndarray:
    if kind == VIEW and _aligned([*q, *k]):
        left, right = np.hstack(_double(q)), np.hstack(_double(k))
        scale = _row_scales(left)
        rows = np.hstack([left / scale, right * scale])
        return rows[_byte_order(rows)]
    left, right = (np.concatenate([part.ravel() for part in _double(x)]) for x in (q, k))
    scale = _row_scales(left[None])[0] if kind in (VIEW, LINEAR) else np.ones(1)
    return np.concatenate([left / scale, right * scale])


def _value_form(v: list[np.ndarray], kind: int) -> ValueForm:
    rows = len(v[0])
    if kind != VIEW or not _aligned(v):
        return ValueForm(
            _digest(np.concatenate([part.ravel() for part in _double(v)])),
            np.arange(rows),
            np.ones(rows),
        )
    stacked = np.hstack(_double(v))
    scale = _row_scales(stacked)
    normal = stacked / scale
    order = _byte_order(normal)
    return ValueForm(_digest(normal[order]), order, scale[:, 0])


def _row_scales(rows: np.ndarray) -> np.ndarray:
    """(rows, 1): ±2ᵉ such that the largest of a row is in [½, 1) and its first is positive."""
    _, exponents = np.frexp(np.abs(rows).max(1))
    first = rows[np.arange(len(rows)), (rows != 0).argmax(1)]
    return (np.ldexp(1.0, exponents) * np.where(first < 0, -1.0, 1.0))[:, None]


def _signature(leaves: list[np.ndarray]) -> bytes:
    """Equal for equal heads, and cheap: the mantissas of the largest entry of each row, sorted."""
    largest = np.concatenate([np.abs(x).max(1).astype("float64") for x in leaves])
    return np.sort(np.frexp(largest)[0]).tobytes()


def _aligned(leaves: list[np.ndarray]) -> bool:
    return len({len(part) for part in leaves}) == 1


def _double(leaves: list[np.ndarray]) -> list[np.ndarray]:
    return [leaf.astype("float64") for leaf in leaves]


def _byte_order(rows: np.ndarray) -> np.ndarray:
    rows = rows + 0.0  # -0.0 is 0.0
    return np.array(sorted(range(len(rows)), key=lambda i: rows[i].tobytes()))


def _digest(form: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(form + 0.0).tobytes()).digest()


def is_finite(leaves: list[np.ndarray]) -> bool:
    return all(np.isfinite(leaf.astype("float32")).all() for leaf in leaves)
