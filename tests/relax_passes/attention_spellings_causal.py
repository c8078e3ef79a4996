"""Causal masks and windows: triangles, comparisons of positions, with padding or without."""

from __future__ import annotations

import torch
from attention_meaning import INF, ROOT, Says, Spelling, Twin, bhsd, square, visible

LOWEST = torch.finfo(torch.float32).min
BUFFER = torch.tril(torch.ones(1, 1, 16, 16, dtype=torch.bool))


def scores_of(q, k):
    return q @ k.mT / ROOT


def finish(scores, v):
    return torch.softmax(scores, -1) @ v


def positions(q, k):
    """(s, 1) and (t,) int64: indices, both from 0."""
    return torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])


def filled(q, k, v, mask, *, add=False):
    scores = scores_of(q, k)
    return finish(scores + mask if add else scores.masked_fill(~mask, -INF), v)


def tril(q, k, v, *, diagonal=0):
    ones = torch.ones(q.shape[2], k.shape[2])
    return finish(scores_of(q, k).masked_fill(torch.tril(ones, diagonal) == 0, -INF), v)


def triu(q, k, v, *, diagonal=1):
    hidden = torch.triu(torch.full((q.shape[2], k.shape[2]), -INF), diagonal)
    return finish(scores_of(q, k) + hidden, v)


def compared(q, k, v, *, compare=torch.le):
    """Keys before the queries: query i is at position i + t - s."""
    i, j = positions(q, k)
    mask = compare(j, i + (k.shape[2] - q.shape[2]))
    return finish(torch.where(mask, scores_of(q, k), LOWEST), v)


def padded_causal(q, k, v, padding, *, join=torch.logical_and):
    i, j = positions(q, k)
    return finish(scores_of(q, k).masked_fill(~join(padding[:, None, None], j <= i), -INF), v)


def windowed(q, k, v, *, ahead=False):
    i, j = positions(q, k)
    mask = (j >= i) & (j < i + 3) if ahead else (j <= i) & (j > i - 3)
    return finish(torch.where(mask, scores_of(q, k), LOWEST), v)


def near(q, k, v, *, compare=torch.lt):
    """Both directions, as encoders have it."""
    i, j = positions(q, k)
    return finish(scores_of(q, k).masked_fill(~compare((i - j).abs(), 3), -INF), v)


def buffered(q, k, v, *, top=False):
    """The last s rows of the first t of a stored triangle."""
    s, t = q.shape[2], k.shape[2]
    triangle = BUFFER[:, :, :s, :t] if top else BUFFER[:, :, t - s : t, :t]
    return finish(torch.where(triangle, scores_of(q, k), -INF), v)


def lowest_or(q, k, v, *, fill=LOWEST):
    i, j = positions(q, k)
    return finish(scores_of(q, k).masked_fill(j > i, fill), v)


def _with(mask_of):
    """Operands: q, k, v, and a mask from the two positions and the other inputs."""
    return lambda q, k, v, *rest: (q, k, v, mask_of(*positions(q, k), *rest))


_BOOL = Says(1 / ROOT, empty_row="nan", bias="bool")
_CAUSAL = Says(1 / ROOT, causal=0)

CAUSAL = (
    Spelling(
        "causal: tril == 0 filled",
        tril,
        square(bhsd),
        _CAUSAL,
        Twin({"diagonal": -1}, "", Says(1 / ROOT, causal=-1, empty_row="nan")),
    ),
    Spelling(
        "causal: triu of -inf added",
        triu,
        square(bhsd),
        _CAUSAL,
        Twin({"diagonal": 2}, "", Says(1 / ROOT, causal=1)),
    ),
    Spelling(
        "causal: positions compared, keys before",
        compared,
        bhsd,
        Says(1 / ROOT, causal="bottom_right", empty_row="uniform"),
        Twin({"compare": torch.lt}, "", Says(1 / ROOT, causal=0)),
    ),
    Spelling(
        "causal and padding",
        padded_causal,
        square(lambda s, t: (*bhsd(s, t), visible(2, t))),
        Says(1 / ROOT, causal=0, empty_row="nan", bias="bool"),
        Twin(
            {"join": torch.logical_or},
            "",
            Says(1 / ROOT, bias="bool"),
            _with(lambda i, j, pad: pad[:, None, None] | (j <= i)),
        ),
        lambda q, k, v, pad: (q, k, v, pad[:, None, None]),
    ),
    Spelling(
        "sliding window",
        windowed,
        square(bhsd),
        Says(1 / ROOT, causal=0, window=3),
        Twin(
            {"ahead": True},
            "",
            Says(1 / ROOT, causal=2, window=3),
        ),
    ),
    Spelling(
        "window in both directions",
        near,
        square(bhsd),
        Says(1 / ROOT, causal=2, window=5),
        Twin({"compare": torch.gt}, "", _BOOL, _with(lambda i, j: (i - j).abs() > 3)),
    ),
    Spelling(
        "causal: triangle sliced, keys before",
        buffered,
        bhsd,
        Says(1 / ROOT, causal="bottom_right"),
        Twin({"top": True}, "", _CAUSAL),
        dynamic=False,
    ),
    Spelling(
        "causal: lowest number filled",
        lowest_or,
        square(bhsd),
        _CAUSAL,
        Twin({"fill": -1.0}, "fill-not-lowest"),
    ),
)
