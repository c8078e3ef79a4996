"""Attention with a bias or none, in forms that Inductor's pattern table lists (by id)."""

from __future__ import annotations

import torch
from attention_meaning import (
    INF,
    Says,
    Spelling,
    Twin,
    additive,
    bhsd,
    bshd,
    heads_first,
    normal,
)
from torch.nn import functional as F

HALF, LOWEST = torch.float16, torch.finfo(torch.float32).min


def t5(q, k, v, bias=None, *, caches=False, change="", dropout=0.0):
    """No scale; a learnt bias; softmax in float32, in the dtype of the scores again."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(3, 2))
    if bias is not None and change != "behind":
        scores = scores + bias
    weights = _t5_softmax(scores, change)
    weights = F.dropout(weights, dropout, training=False)
    weights = weights + bias if change == "behind" else weights
    out = torch.matmul(weights, k if change == "keys" else v)
    return (out, k, v) if caches else out


def _t5_softmax(scores, change):
    if change == "flat":
        return scores.float().flatten(2).softmax(-1).view(scores.shape).type_as(scores)
    scores = torch.sigmoid(scores) if change == "sigmoid" else scores
    weights = torch.softmax(scores.float(), -2 if change == "axis" else -1).type_as(scores)
    return weights * weights if change == "square" else weights


def mbart(q, k, v, mask, *, split=(2, 4), mask_view=(2, 1)):
    """Two products over B · H matrices, the mask added between them over four axes."""
    batch, heads, s, d = q.shape
    t = k.shape[2]
    q, k, v = (x.reshape(batch * heads, -1, d) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(*split, s, t) + mask.view(*mask_view, s, t)
    weights = torch.softmax(scores.view(batch * heads, s, t), -1)
    return torch.bmm(weights, v).view(batch, heads, s, d)


def split_scale(q, k, v, mask, *, guard=None, on_k=torch.mul):
    """What scaled_dot_product_attention decomposes to."""
    root = 0.6
    scores = (q * root) @ on_k(k.transpose(-2, -1), root) + mask
    weights = torch.softmax(scores, -1)
    if guard is None:
        return weights @ v
    is_empty = guard(scores == -INF, -1, keepdim=True)
    return torch.where(is_empty, torch.zeros_like(weights), weights) @ v


def with_mask(draw, mask):
    return lambda s, t: (*draw(s, t), mask(s, t))


def half(s, t):
    return bshd(s, t, HALF)


_LEARNT = Says(1.0, bias="float")
_LEARNT_IN_HALF = Says(1.0, bias="float", scores_dtype="float16")
_SQUARE_BIAS = with_mask(bshd, lambda s, t: normal(1, 4, s, t))
_HALF_BIAS = with_mask(half, lambda s, t: normal(1, 4, s, t, dtype=HALF))

BIASED = (
    Spelling(
        "21 T5",
        t5,
        _SQUARE_BIAS,
        _LEARNT,
        Twin({"change": "behind"}, "weights-changed"),
        heads_first,
    ),
    Spelling(
        "22 T5, k and v returned",
        t5,
        _SQUARE_BIAS,
        _LEARNT,
        Twin({"change": "keys"}, "", _LEARNT, lambda q, k, _, m: (*heads_first(q, k, k), m)),
        heads_first,
        knobs={"caches": True, "dropout": 0.1},
    ),
    Spelling(
        "23 T5, no bias, k and v returned",
        t5,
        bshd,
        Says(1.0),
        Twin({"change": "axis"}, "softmax-axis"),
        heads_first,
        knobs={"caches": True},
    ),
    Spelling(
        "24 MBart: three axes, mask over four",
        mbart,
        with_mask(bhsd, lambda s, t: additive(2, 1, s, t, fill=LOWEST, empty=False)),
        Says(1.0, bias="float"),
        Twin(
            {"split": (4, 2), "mask_view": (1, 2)},
            "layout",
            Says(1.0, bias="float"),
            lambda q, k, v, m: (q, k, v, m[:, 0].repeat(2, 1, 1)),
        ),
    ),
    Spelling(
        "25 T5 in half",
        t5,
        _HALF_BIAS,
        _LEARNT_IN_HALF,
        Twin({"change": "sigmoid"}, "no-product"),
        heads_first,
    ),
    Spelling(
        "26 T5 in half, k and v returned",
        t5,
        _HALF_BIAS,
        _LEARNT_IN_HALF,
        Twin({"change": "square"}, "weights-changed"),
        heads_first,
        knobs={"caches": True},
    ),
    Spelling(
        "27 T5 in half, no bias, k and v returned",
        t5,
        half,
        Says(1.0),
        Twin({"change": "flat"}, "softmax-axis"),
        heads_first,
        knobs={"caches": True},
    ),
    Spelling(
        "29 √scale on q and k, mask",
        split_scale,
        with_mask(bhsd, lambda s, t: additive(2, 1, s, t, empty=True)),
        Says(0.36, empty_row="nan", bias="float"),
        Twin(
            {"on_k": torch.add},
            "",
            Says(0.6, empty_row="nan", bias="float"),
            lambda q, k, v, m: (q, k + 0.6, v, m),
        ),
    ),
    Spelling(
        "30 √scale on q and k, safe softmax",
        split_scale,
        with_mask(bhsd, lambda s, t: additive(2, 1, s, t, empty=True)),
        Says(0.36, empty_row="zero", bias="float"),
        Twin({"guard": torch.any}, "guard-not-proved"),
        knobs={"guard": torch.all},
    ),
)
