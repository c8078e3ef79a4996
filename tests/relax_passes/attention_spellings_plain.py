"""Attention without a mask, in the forms that Inductor's pattern table lists (ids in the names)."""

from __future__ import annotations

import torch
from attention_meaning import ROOT, Says, Spelling, Twin, bhsd, bshd, heads_first, normal
from torch.nn import functional as F

PER_HEAD = torch.tensor([0.2, 0.5, 1.0, 2.0]).reshape(4, 1, 1)
PER_PAIR = torch.linspace(0.1, 2, 42).reshape(6, 7)
PER_CHANNEL = torch.linspace(0.1, 2, 8)
HALF = torch.float16


def divided(q, k, v, *, c=3.0, axis=-1, dropout=0.0):
    weights = torch.softmax(q @ k.transpose(-2, -1) / c, axis)
    return F.dropout(weights, dropout, training=False) @ v


def multiplied(q, k, v, *, c=0.3, behind=1.0, dropout=0.0):
    weights = torch.softmax((q @ k.transpose(-2, -1)) * c, -1)
    weights = F.dropout(weights, dropout, training=False)
    return (weights if behind == 1 else weights * behind) @ v


def permuted(q, k, v, *, axis=-1, dropout=0.0, permute_k=True):
    """(B, S, H, D) inputs."""
    q, v = q.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    k = k.permute(0, 2, 1, 3) if permute_k else k
    weights = torch.softmax(q @ k.transpose(-2, -1) / ROOT, axis)
    return F.dropout(weights, dropout, training=False) @ v


def half_with_wide_softmax(q, k, v, *, between=None, dropout=0.0):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) / ROOT
    scores = between(scores) if between else scores
    weights = torch.softmax(scores.to(torch.float32), -1)
    return F.dropout(weights, dropout, training=False).to(q.dtype) @ v


def half_scaled_query(q, k, v, *, q_factor=1 / ROOT, k_factor=None, dropout=0.0):
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    k = k if k_factor is None else k * k_factor
    scores = (q * q_factor) @ k.transpose(-2, -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    return F.dropout(weights, dropout, training=False).to(q.dtype) @ v


def three_axes(q, k, v, *, contract="keys"):
    weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
    return torch.bmm(weights if contract == "keys" else weights.transpose(1, 2), v)


def strided(q, k, v, *, axes=(0, 2, 3, 1)):
    """k straight to (B, H, D, S), without a second transpose."""
    q, v = q.transpose(1, 2), v.transpose(1, 2).contiguous()
    return torch.softmax((q @ k.permute(axes)).div(2.0), -1).matmul(v).transpose(1, 2)


def half(s, t):
    return bshd(s, t, HALF)


def one_batch_axis(s, t):
    return tuple(normal(5, n, 8) for n in (s, t, t))


def as_many_channels_as_heads(s, t):
    return tuple(normal(2, n, 4, 4) for n in (s, t, t))


_ROOT = Says(1 / ROOT)
PLAIN = (
    Spelling("01 scores / c", divided, bhsd, Says(1 / 3), Twin({"axis": -2}, "softmax-axis")),
    Spelling(
        "02 scores · c",
        multiplied,
        bhsd,
        Says(0.3),
        Twin({"c": PER_HEAD}, "scores-multiplied", Says(1.0), lambda q, k, v: (q * PER_HEAD, k, v)),
    ),
    Spelling(
        "03 scores / c, dropout",
        divided,
        bhsd,
        Says(1 / 3),
        Twin({"c": PER_PAIR}, "scores-multiplied"),
        knobs={"dropout": 0.5},
    ),
    Spelling(
        "04 scores · c, dropout",
        multiplied,
        bhsd,
        Says(0.3),
        Twin({"behind": 0.5}, "weights-changed", Says(0.3), lambda q, k, v: (q, k, 0.5 * v)),
        knobs={"dropout": 0.5},
    ),
    Spelling(
        "07 half, softmax in float32, dropout",
        half_with_wide_softmax,
        half,
        _ROOT,
        Twin({"between": torch.round}, "no-product"),
        heads_first,
        knobs={"dropout": 0.5},
    ),
    Spelling(
        "08 half, softmax in float32",
        half_with_wide_softmax,
        half,
        _ROOT,
        Twin({"between": torch.relu}, "no-product"),
        heads_first,
    ),
    Spelling(
        "09 half, q scaled, dropout",
        half_scaled_query,
        half,
        _ROOT,
        Twin(
            {"q_factor": PER_CHANNEL.to(HALF)},
            "",
            Says(1.0),
            lambda *x: heads_first(x[0] * PER_CHANNEL.to(HALF), *x[1:]),
        ),
        heads_first,
        knobs={"dropout": 0.5},
    ),
    Spelling(
        "10 half, q scaled",
        half_scaled_query,
        half,
        _ROOT,
        Twin({"k_factor": 2.0}, "", Says(2 / ROOT), heads_first),
        heads_first,
    ),
    Spelling(
        "11 permuted, divided",
        permuted,
        bshd,
        _ROOT,
        Twin(
            {"permute_k": False},
            "layout",
            _ROOT,
            lambda q, k, v: (q.transpose(1, 2), k, v.transpose(1, 2)),
        ),
        heads_first,
        lengths=(4, 4),
    ),
    Spelling(
        "12 permuted, divided, dropout",
        permuted,
        bshd,
        _ROOT,
        Twin({"axis": 1}, "softmax-axis"),
        heads_first,
        knobs={"dropout": 0.1},
    ),
    Spelling(
        "13 three axes, no scale",
        three_axes,
        one_batch_axis,
        Says(1.0, heads=None),
        Twin({"contract": "queries"}, "softmax-axis"),
        lambda *x: tuple(y[:, None] for y in x),
        lambda out: out[:, 0],
        lengths=(6, 6),
    ),
    Spelling(
        "28 k to (B, H, D, S) at once",
        strided,
        as_many_channels_as_heads,
        Says(0.5),
        Twin(
            {"axes": (0, 3, 2, 1)},
            "layout",
            Says(0.5),
            lambda q, k, v: heads_first(q, k.transpose(2, 3), v),
        ),
        heads_first,
        lambda out: out.transpose(1, 2),
    ),
)
