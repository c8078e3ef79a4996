"""Axes: named by einsum, transposed, folded into the batch, of other widths."""

from __future__ import annotations

import torch
from attention_meaning import (
    ROOT,
    Says,
    Spelling,
    Twin,
    bhsd,
    bshd,
    heads_first,
    normal,
    square,
)


def einsum_bqhd(q, k, v, *, out="bhqk,bkhd->bqhd"):
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) / ROOT, -1)
    return torch.einsum(out, weights, v)


def einsum_bhqd(q, k, v, *, scores="bhqd,bhkd->bhqk"):
    weights = torch.softmax(torch.einsum(scores, q, k) / ROOT, -1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def einsum_transposed(q, k, v, *, axis=2):
    scores = torch.einsum("bhqd,bhkd->bhkq", q, k) / ROOT
    return torch.einsum("bhkq,bhkd->bhqd", torch.softmax(scores, axis), v)


def transposed_scores(q, k, v, *, back=True):
    """A row per key: softmax over the rows."""
    weights = torch.softmax(k @ q.mT / ROOT, -2)
    return (weights.mT if back else weights) @ v


def folded(q, k, v, *, scrambled=False):
    """(B, S, H, D) inputs; products over B · H matrices of three axes."""
    if not scrambled:
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    s, t = (x.shape[1] * x.shape[2] // 4 for x in (q, k))
    q, k, v = (x.reshape(8, n, 8) for x, n in ((q, s), (k, t), (v, t)))
    out = torch.bmm(torch.softmax(torch.bmm(q, k.mT) / ROOT, -1), v)
    return out.view(2, 4, s, 8)


def bloom(q, k, v, bias, *, beta=1.0):
    """baddbmm adds the bias and scales the product at once."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = bias.expand(2, 4, q.shape[1], k.shape[1]).reshape(8, q.shape[1], k.shape[1])
    scores = torch.baddbmm(bias, q, k.mT, beta=beta, alpha=1 / ROOT)
    return torch.bmm(torch.softmax(scores, -1), v).unflatten(0, (2, 4))


def narrow_key(q, k, v, *, width=8):
    return torch.softmax(q[..., :width] @ k[..., :width].mT / ROOT, -1) @ v


def shared(x, v, *, transpose=True):
    """Keys are the queries."""
    return torch.softmax((x @ x.mT if transpose else x @ x) / ROOT, -1) @ v


_ROOT = Says(1 / ROOT)
LAYOUT = (
    Spelling(
        "einsum bqhd,bkhd->bhqk",
        einsum_bqhd,
        bshd,
        _ROOT,
        Twin({"out": "bhkq,bkhd->bqhd"}, "softmax-axis"),
        heads_first,
        lambda out: out.transpose(1, 2),
        lengths=(6, 6),
    ),
    Spelling(
        "einsum bhqd,bhkd->bhqk",
        einsum_bhqd,
        bhsd,
        _ROOT,
        Twin(
            {"scores": "bhqd,bhke->bhqk"},
            "scores-multiplied",
            _ROOT,
            lambda q, k, v: (q.sum(-1, keepdim=True), k.sum(-1, keepdim=True), v),
        ),
    ),
    Spelling(
        "einsum bhqd,bhkd->bhkq, softmax over 2",
        einsum_transposed,
        bhsd,
        _ROOT,
        Twin({"axis": 3}, "softmax-axis"),
    ),
    Spelling(
        "scores transposed",
        transposed_scores,
        square(bhsd),
        _ROOT,
        Twin({"back": False}, "softmax-axis"),
    ),
    Spelling(
        "heads folded into the batch",
        folded,
        bshd,
        _ROOT,
        Twin(
            {"scrambled": True},
            "",
            Says(1 / ROOT, heads=None),
            lambda *x: tuple(y.reshape(2, 4, y.shape[1], 8) for y in x),
        ),
        heads_first,
    ),
    Spelling(
        "baddbmm with alpha and beta",
        bloom,
        lambda s, t: (*bhsd(s, t), normal(1, 4, 1, t)),
        Says(1 / ROOT, bias="float"),
        Twin(
            {"beta": 0.5},
            "",
            Says(1 / ROOT, bias="float"),
            lambda q, k, v, m: (q, k, v, m / 2),
        ),
    ),
    Spelling(
        "values wider than keys",
        narrow_key,
        lambda s, t: (*bhsd(s, t)[:2], normal(2, 4, t, 16)),
        _ROOT,
        Twin({"width": 6}, "", _ROOT, lambda q, k, v: (q[..., :6], k[..., :6], v)),
    ),
    Spelling(
        "q and k are one tensor",
        shared,
        lambda s, _: (normal(2, 4, s, 8), normal(2, 4, s, 8)),
        _ROOT,
        Twin({"transpose": False}, "", _ROOT, lambda x, v: (x, x.mT, v)),
        lambda x, v: (x, x, v),
        lengths=(8, 8),
    ),
)
