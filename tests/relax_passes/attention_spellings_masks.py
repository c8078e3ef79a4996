"""Masks given or made, added or selected, and several at once."""

from __future__ import annotations

import torch
from attention_meaning import INF, ROOT, Says, Spelling, Twin, additive, bhsd, square, visible

LOWEST = torch.finfo(torch.float32).min


def scores_of(q, k):
    return q @ k.mT / ROOT


def finish(scores, v):
    return torch.softmax(scores, -1) @ v


def positions(q, k):
    """(s, 1) and (t,) int64: indices, both from 0."""
    return torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])


def inverted(q, k, v, mask, *, factor=LOWEST):
    """(1 - m) · lowest, as in BERT: m is bool, cast."""
    return finish(scores_of(q, k) + (1.0 - mask.float()) * factor, v)


def selected(q, k, v, mask, *, fill=-INF):
    return finish(torch.where(mask, scores_of(q, k), fill), v)


def filled(q, k, v, mask, *, add=False):
    scores = scores_of(q, k)
    return finish(scores + mask if add else scores.masked_fill(~mask, -INF), v)


def scaled_last(q, k, v, mask, *, fill=-INF, factor=1 / ROOT):
    return finish((q @ k.mT).masked_fill(~mask, fill) * factor, v)


def two_masks(q, k, v, mask, bias, *, join=torch.add):
    return finish(torch.where(mask, join(scores_of(q, k), bias), -INF), v)


def triu(q, k, v, *, diagonal=1):
    hidden = torch.triu(torch.full((q.shape[2], k.shape[2]), -INF), diagonal)
    return finish(scores_of(q, k) + hidden, v)


def prefix(q, k, v, *, length=3, causal=True):
    """The first keys are visible to all."""
    i, j = positions(q, k)
    shown = (j <= i) | (j < length) if causal else (j <= i) & (j < length)
    return finish(torch.where(shown, scores_of(q, k), -INF), v)


def documents(q, k, v, segment, *, compare=torch.eq):
    """Causal within a document."""
    i, j = positions(q, k)
    same = compare(segment[:, None, :, None], segment[:, None, None, :])
    return finish(scores_of(q, k).masked_fill(~(same & (j <= i)), LOWEST), v)


def sunk(q, k, v, mask, sink, *, with_sink=False):
    """A column of learnt scores that takes weight and has no value."""
    scores = scores_of(q, k) + mask
    if not with_sink:
        return finish(scores, v)
    column = sink.view(1, 4, 1, 1).expand(2, 4, q.shape[2], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1] @ v


def ones_mask(q, k, v, *, low=0.0):
    """A mask that hides nothing."""
    hidden = torch.full((q.shape[2], k.shape[2]), low).triu(1)
    return finish(scores_of(q, k) + hidden, v)


def masked(s, t):
    return (*bhsd(s, t), visible(2, 1, s, t))


def _with(mask_of):
    """Operands: q, k, v, and a mask from the two positions and the other inputs."""
    return lambda q, k, v, *rest: (q, k, v, mask_of(*positions(q, k), *rest))


_ROOT = Says(1 / ROOT)
_BOOL = Says(1 / ROOT, empty_row="nan", bias="bool")
_CAUSAL = Says(1 / ROOT, causal=0)

MASKS = (
    Spelling(
        "(1 - mask) · lowest, added",
        inverted,
        masked,
        Says(1 / ROOT, empty_row="uniform", bias="bool|float"),
        Twin(
            {"factor": -2.0},
            "",
            Says(1 / ROOT, bias="float"),
            lambda q, k, v, m: (q, k, v, (1 - m.float()) * -2),
        ),
    ),
    Spelling("where, -inf", selected, masked, _BOOL, Twin({"fill": 0.0}, "fill-not-lowest")),
    Spelling(
        "masked_fill, -inf",
        filled,
        masked,
        _BOOL,
        Twin(
            {"add": True},
            "",
            Says(1 / ROOT, bias="float"),
            lambda q, k, v, m: (q, k, v, m.float()),
        ),
    ),
    Spelling(
        "two masks: added, then selected",
        two_masks,
        lambda s, t: (*masked(s, t), additive(1, 4, 1, t, fill=-1.0)),
        Says(1 / ROOT, empty_row="nan", bias="float"),
        Twin({"join": torch.mul}, "scores-multiplied"),
        lambda q, k, v, m, b: (q, k, v, torch.where(m, b, -INF)),
    ),
    Spelling(
        "prefix visible to all",
        prefix,
        square(bhsd),
        Says(1 / ROOT, bias="bool"),
        Twin(
            {"causal": False},
            "",
            Says(1 / ROOT, causal=0, bias="bool"),
            _with(lambda i, j: j < 3),
        ),
        _with(lambda i, j: (j <= i) | (j < 3)),
    ),
    Spelling(
        "documents, causal",
        documents,
        square(lambda s, t: (*bhsd(s, t), torch.arange(2 * t).view(2, t) // 3)),
        Says(1 / ROOT, causal=0, empty_row="uniform", bias="bool"),
        Twin(
            {"compare": torch.ne},
            "",
            Says(1 / ROOT, causal=0, empty_row="uniform", bias="bool"),
            lambda q, k, v, d: (q, k, v, d[:, None, :, None] != d[:, None, None]),
        ),
        lambda q, k, v, d: (q, k, v, d[:, None, :, None] == d[:, None, None]),
    ),
    Spelling(
        "no sink",
        sunk,
        lambda s, t: (*bhsd(s, t), additive(1, 1, s, t, empty=False), torch.randn(4)),
        Says(1 / ROOT, bias="float"),
        Twin({"with_sink": True}, "weights-changed"),
        lambda q, k, v, m, _: (q, k, v, m),
    ),
    Spelling(
        "scaled after an infinite mask",
        scaled_last,
        lambda s, t: (*bhsd(s, t), visible(2, 1, s, t)),
        Says(1 / ROOT, empty_row="nan", bias="bool"),
        Twin({"factor": -1 / ROOT}, "scale-after-mask"),
    ),
    Spelling(
        "scaled by 2 after an infinite mask",
        scaled_last,
        lambda s, t: (*bhsd(s, t), visible(2, 1, s, t)),
        Says(2.0, empty_row="nan", bias="bool"),
        Twin({"fill": -4.0}, "scale-after-mask"),
        knobs={"factor": 2.0},
    ),
    Spelling(
        "a mask of zeros added",
        ones_mask,
        square(bhsd),
        _ROOT,
        Twin({"low": -INF}, "", _CAUSAL),
    ),
)
