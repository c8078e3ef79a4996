"""What is done to q, k and scores: scale, softcap, norms, rotary embeddings, ALiBi."""

from __future__ import annotations

import torch
from attention_meaning import (
    ROOT,
    Says,
    Spelling,
    Twin,
    additive,
    bhsd,
)

CAP = 2.0
GAIN = torch.tensor([0.5, 1.0, 2.0, 4.0]).view(4, 1, 1)


def scaled(q, k, v, *, on_q=1.0, on_k=1.0, on_scores=1.0):
    return torch.softmax((q * on_q) @ (k * on_k).mT * on_scores, -1) @ v


def scaled_by_tensor(q, k, v, given, *, run_time=False):
    scale = given if run_time else torch.rsqrt(torch.tensor(8.0))
    return torch.softmax(q @ k.mT * scale, -1) @ v


def capped(q, k, v, mask, *, cap_last=False):
    scores = q @ k.mT / ROOT
    if cap_last:
        return torch.softmax(_cap(scores + mask), -1) @ v
    return torch.softmax(_cap(scores) + mask, -1) @ v


def _cap(scores):
    return torch.tanh(scores / CAP) * CAP


def capped_at_once(q, k, v, *, inside=1 / (ROOT * CAP), outside=CAP):
    """The scale and 1 / cap are one factor."""
    return torch.softmax(((q @ k.mT) * inside).tanh() * outside, -1) @ v


def rotated(q, k, v, angle, *, rotate=None, on_v=False, on_scores=False):
    """Rotary embedding, outside of the attention."""
    cos, sin = angle.cos(), angle.sin()
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    v = rotate(v, cos, sin) if on_v else v
    scores = q @ k.mT / ROOT
    scores = scores * cos[:, :1] if on_scores else scores
    return torch.softmax(scores, -1) @ v


def half_rotation(x, cos, sin):
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    left, right = x[..., :4], x[..., 4:]
    return x * cos + torch.cat((-right, left), -1) * sin


def interleaved_rotation(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2)


def partial_rotation(x, cos, sin):
    left, right, rest = x[..., :2], x[..., 2:4], x[..., 4:]
    cos, sin = cos[..., :2], sin[..., :2]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)


def normed(q, k, v, *, scores_too=False):
    """RMS norms of q and k, as Qwen 3 has them, with no scale behind."""
    scores = rms_norm(q) @ rms_norm(k).mT
    scores = rms_norm(scores) if scores_too else scores
    return torch.softmax(scores, -1) @ v


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def alibi(q, k, v, *, form=torch.add):
    """A bias that is linear in the distance, by head."""
    i, j = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    return torch.softmax(form(q @ k.mT / ROOT, GAIN * (j[None] - i[:, None])), -1) @ v


def _alibi_operands(q, k, v):
    return q, k, v, GAIN * (torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None])


def half(dtype):
    return lambda s, t: bhsd(s, t, dtype)


def turning(s, _):
    angle = torch.arange(s)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
    return (*bhsd(s, s), angle)


def _turned(rotation, on_v=False):
    def operands(q, k, v, angle):
        q, k, turned_v = (rotation(x, angle.cos(), angle.sin()) for x in (q, k, v))
        return q, k, turned_v if on_v else v

    return operands


_ROOT = Says(1 / ROOT)


def _scaled_rows(q, k, v, angle):
    return q * angle.cos()[:, :1], k, v


SCORES = (
    Spelling(
        "scale on q",
        scaled,
        bhsd,
        Says(0.4),
        Twin({"on_scores": 2.0}, "", Says(0.8)),
        knobs={"on_q": 0.4},
    ),
    Spelling(
        "scale on k",
        scaled,
        bhsd,
        Says(0.4),
        Twin({"on_q": GAIN}, "", Says(0.4), lambda q, k, v: (q * GAIN, k, v)),
        knobs={"on_k": 0.4},
    ),
    Spelling(
        "scale on q, k and scores",
        scaled,
        bhsd,
        Says(0.5 * 0.4 * 3),
        Twin({"on_scores": torch.ones(6, 7).tril() + 0.5}, "scores-multiplied"),
        knobs={"on_q": 0.5, "on_k": 0.4, "on_scores": 3.0},
    ),
    Spelling(
        "scale a 0-d tensor",
        scaled_by_tensor,
        lambda s, t: (*bhsd(s, t), torch.tensor(2.0)),
        _ROOT,
        Twin(
            {"run_time": True},
            "scores-multiplied",
            Says(1.0),
            lambda q, k, v, scale: (q * scale, k, v),
        ),
        lambda q, k, v, _: (q, k, v),
    ),
    Spelling(
        "softcap, mask",
        capped,
        lambda s, t: (*bhsd(s, t), additive(1, 1, s, t, empty=False)),
        Says(1 / ROOT, softcap=CAP, bias="float"),
        Twin({"cap_last": True}, "scale-after-mask"),
    ),
    Spelling(
        "softcap, one factor inside",
        capped_at_once,
        bhsd,
        Says(1 / ROOT, softcap=CAP),
        Twin({"outside": 5.0}, "", Says(5 / (ROOT * CAP), softcap=5.0)),
    ),
    Spelling(
        "RoPE: half rotation",
        rotated,
        turning,
        _ROOT,
        Twin({"on_v": True}, "", _ROOT, _turned(half_rotation, on_v=True)),
        _turned(half_rotation),
        knobs={"rotate": half_rotation},
    ),
    Spelling(
        "RoPE: interleaved",
        rotated,
        turning,
        _ROOT,
        Twin({"rotate": half_rotation}, "", _ROOT, _turned(half_rotation)),
        _turned(interleaved_rotation),
        knobs={"rotate": interleaved_rotation},
    ),
    Spelling(
        "RoPE: a part of the channels",
        rotated,
        turning,
        _ROOT,
        Twin(
            {"on_scores": True},
            "scores-multiplied",
            _ROOT,
            lambda *x: _scaled_rows(*_turned(partial_rotation)(*x), x[3]),
        ),
        _turned(partial_rotation),
        knobs={"rotate": partial_rotation},
    ),
    Spelling(
        "q and k normed",
        normed,
        bhsd,
        Says(1.0),
        Twin({"scores_too": True}, "scores-multiplied"),
        lambda q, k, v: (rms_norm(q), rms_norm(k), v),
    ),
    Spelling(
        "ALiBi",
        alibi,
        bhsd,
        Says(1 / ROOT, bias="float"),
        Twin({"form": torch.mul}, "scores-multiplied"),
        _alibi_operands,
    ),
)
