"""Attention with masks, in forms that Inductor's pattern table lists (by id)."""

from __future__ import annotations

import torch
from attention_meaning import (
    INF,
    ROOT,
    Says,
    Spelling,
    Twin,
    additive,
    bhsd,
    bshd,
    heads_first,
    normal,
    square,
    visible,
)
from torch.nn import functional as F

HALF, LOWEST = torch.float16, torch.finfo(torch.float32).min
LOWER = torch.tril(torch.ones(1, 1, 16, 16, dtype=torch.bool))
UPPER = LOWER.mT.contiguous()


def biased(q, k, v, mask, *, dropout=0.0, form="add"):
    scores = q @ k.transpose(-2, -1)
    if form == "add":
        scores = scores / ROOT + mask
    elif form == "multiply":
        scores = scores / ROOT * mask
    else:
        scores = (scores + mask) / ROOT
    return F.dropout(torch.softmax(scores, -1), dropout, training=False) @ v


def bert(q, k, v, mask, *, prepare=lambda mask, dtype: mask):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) / ROOT + prepare(mask, q.dtype)
    return torch.softmax(scores, -1).to(q.dtype) @ v


def distilbert(
    q, k, v, mask, *, scale_q=False, fill=-INF, shown=1, view=(2, 1, 1, -1), dropout=0.0
):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q / ROOT) @ k.transpose(2, 3) if scale_q else q @ k.transpose(2, 3) / ROOT
    hidden = (mask != shown).view(view).expand_as(scores)
    weights = torch.softmax(scores.masked_fill(hidden, fill), -1)
    return F.dropout(weights, dropout, training=False) @ v


def gpt2(q, k, v, *mask, triangle=LOWER, fill=LOWEST, caches=True):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2)) / ROOT
    causal = triangle[:, :, : q.shape[2], : k.shape[2]]
    scores = torch.where(causal, scores, torch.full([], fill, dtype=scores.dtype))
    weights = torch.softmax(scores + mask[0] if mask else scores, -1)
    return (weights @ v, k, v) if caches else weights @ v


def with_mask(draw, mask):
    return lambda s, t: (*draw(s, t), mask(s, t))


def half(s, t):
    return bshd(s, t, HALF)


def padding(_, t):
    """(B, t) of 0 and 1, all 0 in the last row."""
    return visible(2, t).long()


def left_padding(_, t):
    """(B, 1, 1, t): the first two keys of the last sequence get the lowest number."""
    mask = torch.zeros(2, 1, 1, t)
    mask[1, ..., :2] = LOWEST
    return mask


def _shown(value, *shape):
    return lambda *x: (*heads_first(*x[:3]), (x[3] == value).view(shape))


_BIASED = Says(1 / ROOT, bias="float")
_BAND = with_mask(bhsd, lambda s, t: additive(1, 1, s, t, empty=False))
_PADDED = with_mask(bshd, padding)
_KEYS = (2, 1, 1, -1)


def _both(mask):
    """The causal fill and the mask as one float bias."""
    size = mask.shape[-1]
    return torch.where(LOWER[..., :size, :size], 0.0, LOWEST) + mask


MASKED = (
    Spelling(
        "05 / √D + mask", biased, _BAND, _BIASED, Twin({"form": "multiply"}, "scores-multiplied")
    ),
    Spelling(
        "06 / √D + mask, dropout",
        biased,
        with_mask(bhsd, lambda s, t: normal(1, 1, s, t)),
        _BIASED,
        Twin({"form": "last"}, "scale-after-mask", _BIASED, lambda q, k, v, m: (q, k, v, m / ROOT)),
        knobs={"dropout": 0.5},
    ),
    Spelling(
        "14 BERT: mask (B, 1, 1, S)",
        bert,
        with_mask(bshd, lambda _, t: 3 * normal(2, 1, 1, t)),
        _BIASED,
        Twin(
            {"prepare": lambda mask, _: mask.mT},
            "",
            _BIASED,
            lambda *x: (*heads_first(*x[:3]), x[3].mT),
        ),
        heads_first,
        lengths=(6, 6),
    ),
    Spelling(
        "15 DistilBERT",
        distilbert,
        _PADDED,
        Says(1 / ROOT, empty_row="nan", bias="bool"),
        Twin({"fill": -10.0}, "fill-not-lowest"),
        _shown(1, *_KEYS),
    ),
    Spelling(
        "16 BERT in half, mask in float32",
        bert,
        with_mask(half, lambda _, t: additive(2, 1, 1, t, fill=LOWEST)),
        Says(1 / ROOT, empty_row=None, bias="float"),
        Twin(
            {"prepare": lambda mask, dtype: mask.to(dtype)},
            "",
            Says(1 / ROOT, empty_row="nan", bias="float", scores_dtype="float16"),
            lambda *x: (*heads_first(*x[:3]), x[3].to(HALF)),
        ),
        heads_first,
    ),
    Spelling(
        "17 DistilBERT, dropout",
        distilbert,
        _PADDED,
        Says(1 / ROOT, empty_row="nan", bias="bool"),
        Twin({"shown": 0}, "", Says(1 / ROOT, empty_row="nan", bias="bool"), _shown(0, *_KEYS)),
        _shown(1, *_KEYS),
        knobs={"dropout": 0.1},
    ),
    Spelling(
        "18 GPT-2: causal, k and v returned",
        gpt2,
        square(bshd),
        Says(1 / ROOT, causal=0),
        Twin(
            {"triangle": UPPER},
            "",
            Says(1 / ROOT, window=1),
        ),
        heads_first,
    ),
    Spelling(
        "19 GPT-2: causal and a mask",
        gpt2,
        square(with_mask(bshd, left_padding)),
        _BIASED,
        Twin({"fill": 0.0}, "fill-not-lowest"),
        lambda *x: (*heads_first(*x[:3]), _both(x[3])),
        knobs={"caches": False},
    ),
    Spelling(
        "20 DistilBERT, q scaled, lowest number",
        distilbert,
        _PADDED,
        Says(1 / ROOT, empty_row="uniform", bias="bool"),
        Twin(
            {"view": (2, 1, -1, 1)},
            "",
            Says(1 / ROOT, empty_row="uniform", bias="bool"),
            _shown(1, 2, 1, -1, 1),
        ),
        _shown(1, *_KEYS),
        lengths=(6, 6),
        knobs={"scale_q": True, "fill": LOWEST},
    ),
)
