"""The softmax: its dtype, its parts, guards behind it, and all of it as one op of torch."""

from __future__ import annotations

import torch
from attention_meaning import (
    INF,
    ROOT,
    Says,
    Spelling,
    Twin,
    bhsd,
    grouped,
    visible,
)
from torch.nn.functional import scaled_dot_product_attention as sdpa

GAIN = torch.tensor([0.5, 1.0, 2.0, 4.0]).view(4, 1, 1)


def scaled(q, k, v, *, on_q=1.0, on_k=1.0, on_scores=1.0):
    return torch.softmax((q * on_q) @ (k * on_k).mT * on_scores, -1) @ v


def scaled_after_cast(q, k, v, *, dtype=torch.float32, factor=1 / ROOT, weights=None):
    """Half-precision inputs; everything between the products in `dtype`."""
    p = torch.softmax((q @ k.mT).to(dtype) * factor, -1)
    return (weights(p) if weights else p).to(v.dtype) @ v


def guarded(q, k, v, mask, *, value=0.0):
    weights = torch.softmax((q @ k.mT / ROOT).masked_fill(~mask, -INF), -1)
    return torch.where(torch.isnan(weights), value, weights) @ v


def without_nan(q, k, v, mask, *, value=0.0):
    weights = torch.softmax(torch.where(mask, q @ k.mT / ROOT, -INF), -1)
    return torch.nan_to_num(weights, nan=value) @ v


def parts(q, k, v, *, axis=-1, shift=True):
    """exp, sum and division by hand."""
    scores = q @ k.mT / ROOT
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = torch.exp(scores) if not shift else powers
    return (powers / total.sum(axis, keepdim=True)) @ v


def divided_last(q, k, v, *, total=lambda powers: powers.sum(-1, keepdim=True), shift=True):
    """The values are summed before the division, as online softmax does."""
    scores = q @ k.mT / ROOT
    powers = torch.exp(scores - scores.amax(-1, keepdim=True) if shift else scores)
    return (powers @ v) / total(powers)


def normalised_by_logarithm(
    q, k, v, *, axis=-1, logarithm=lambda x, axis: torch.logsumexp(x, axis, keepdim=True)
):
    scores = q @ k.mT / ROOT
    return torch.exp(scores - logarithm(scores, axis)) @ v


def stabilised_twice(q, k, v, *, axis=-1):
    scores = q @ k.mT / ROOT
    return torch.softmax(scores - scores.amax(axis, keepdim=True), -1) @ v


def sdpa_causal(q, k, v, *, shifted=0):
    if not shifted:
        return sdpa(q, k, v, is_causal=True)
    return sdpa(q, k, v, torch.ones(q.shape[2], k.shape[2]).tril(shifted).bool())


def sdpa_grouped(q, k, v, *, factor=None):
    return sdpa(q if factor is None else q * factor, k, v, enable_gqa=True)


def sdpa_scaled(q, k, v, mask, *, form=lambda mask: mask):
    return sdpa(q, k, v, form(mask), scale=0.7)


def half(dtype):
    return lambda s, t: bhsd(s, t, dtype)


def masked(s, t):
    return (*bhsd(s, t), visible(2, 1, s, t))


_ROOT = Says(1 / ROOT)

SOFTMAX = (
    Spelling(
        "half, scaled after the cast",
        scaled_after_cast,
        half(torch.float16),
        _ROOT,
        Twin({"factor": 1.0}, "", Says(1.0)),
    ),
    Spelling(
        "bfloat16, softmax in float32",
        scaled_after_cast,
        half(torch.bfloat16),
        _ROOT,
        Twin({"weights": lambda p: (p * 7).round() / 7}, "weights-changed"),
    ),
    Spelling(
        "half throughout",
        scaled_after_cast,
        half(torch.float16),
        _ROOT,
        Twin({"weights": torch.sqrt}, "weights-changed"),
        knobs={"dtype": torch.float16},
    ),
    Spelling(
        "NaN guard: where(isnan)",
        guarded,
        masked,
        Says(1 / ROOT, empty_row="zero", bias="bool"),
        Twin({"value": 1.0}, "weights-changed"),
    ),
    Spelling(
        "NaN guard: nan_to_num",
        without_nan,
        masked,
        Says(1 / ROOT, empty_row="zero", bias="bool"),
        Twin({"value": 0.5}, "weights-changed"),
    ),
    Spelling("exp, sum, divide", parts, bhsd, _ROOT, Twin({"axis": -2}, "mask-of-scores")),
    Spelling(
        "exp, sum, divide; sum of its own",
        parts,
        bhsd,
        _ROOT,
        Twin({"shift": False}, "softmax-sum"),
    ),
    Spelling(
        "division behind the values",
        divided_last,
        bhsd,
        _ROOT,
        Twin({"total": lambda powers: powers.sum((1, 3), keepdim=True)}, "softmax-sum"),
    ),
    Spelling(
        "division behind the values, no maximum",
        divided_last,
        bhsd,
        _ROOT,
        Twin({"total": lambda powers: powers.square().sum(-1, keepdim=True)}, "softmax-sum"),
        knobs={"shift": False},
    ),
    Spelling(
        "logsumexp subtracted",
        normalised_by_logarithm,
        bhsd,
        _ROOT,
        Twin({"axis": -2}, "softmax-axis"),
    ),
    Spelling(
        "logsumexp subtracted, no maximum",
        normalised_by_logarithm,
        bhsd,
        _ROOT,
        Twin({"axis": 1}, "softmax-axis"),
        knobs={"logarithm": lambda x, axis: x.exp().sum(axis, keepdim=True).log()},
    ),
    Spelling(
        "maximum subtracted twice",
        stabilised_twice,
        bhsd,
        _ROOT,
        Twin(
            {"axis": -2},
            "mask-of-scores",
            Says(1 / ROOT, bias="float"),
            lambda q, k, v: (q, k, v, -(q @ k.mT / ROOT).amax(-2, keepdim=True)),
        ),
    ),
    Spelling(
        "sdpa: is_causal",
        sdpa_causal,
        bhsd,
        Says(1 / ROOT, causal=0),
        Twin({"shifted": 1}, "", Says(1 / ROOT, causal=1)),
    ),
    Spelling(
        "sdpa: enable_gqa",
        sdpa_grouped,
        grouped,
        Says(1 / ROOT, heads=(4, 2)),
        Twin({"factor": GAIN}, "", Says(1 / ROOT, heads=(4, 2)), lambda q, k, v: (q * GAIN, k, v)),
    ),
    Spelling(
        "sdpa: bool mask, scale",
        sdpa_scaled,
        masked,
        Says(0.7, empty_row="zero", bias="bool"),
        Twin(
            {"form": lambda mask: mask.float()},
            "",
            Says(0.7, empty_row=None, bias="float"),
            lambda q, k, v, m: (q, k, v, m.float()),
        ),
    ),
)
