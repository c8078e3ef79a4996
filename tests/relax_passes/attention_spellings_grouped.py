"""Heads that share keys and values, that come packed, or that leave more than the output."""

from __future__ import annotations

import torch
from attention_meaning import ROOT, Says, Spelling, Twin, bhsd, grouped, normal


def attend(q, k, v, *, axis=-1):
    return torch.softmax((q @ k.mT) * (1 / ROOT), axis) @ v


def repeat_expand(x, times, *, tiled=False):
    batch, heads, length, width = x.shape
    shape = (batch, times, heads) if tiled else (batch, heads, times)
    x = x.unsqueeze(1 if tiled else 2).expand(*shape, length, width)
    return x.reshape(batch, heads * times, length, width)


def grouped_expand(q, k, v, *, tiled=False, flip_v=False):
    times = q.shape[1] // k.shape[1]
    v = v.flip(1) if flip_v else v
    return attend(q, *(repeat_expand(x, times, tiled=tiled) for x in (k, v)))


def grouped_interleave(q, k, v, *, tile_v=False):
    k = k.repeat_interleave(2, dim=1)
    v = v.repeat(1, 2, 1, 1) if tile_v else v.repeat_interleave(2, dim=1)
    return attend(q, k, v)


def grouped_copies(q, k, v, *, copies, values=None):
    """Repeats as a list of the same tensor."""
    return attend(q, copies(k, k), copies(v, v if values is None else values(v)))


def stacked(x, y):
    return torch.stack([x, y], 2).flatten(1, 2)


def concatenated(x, y):
    return torch.cat([x.unsqueeze(2), y.unsqueeze(2)], 2).flatten(1, 2)


def grouped_five_axes(q, k, v, *, tiled=False):
    axis = 1 if tiled else 2
    rows = q.view(2, 2, 2, q.shape[2], 8)
    return attend(rows, k.unsqueeze(axis), v.unsqueeze(axis)).reshape(q.shape)


def grouped_rows(q, k, v, *, axis=-1):
    """The query heads of a group as rows of one product."""
    rows = q.unflatten(1, (2, 2)).flatten(2, 3)
    return attend(rows, k, v, axis=axis).unflatten(2, (2, q.shape[2])).flatten(1, 2)


def multi_query(q, k, v, *, own_values=False):
    v = v.expand(-1, q.shape[1], -1, -1)
    return attend(q, k.expand(-1, q.shape[1], -1, -1), v * OWN if own_values else v)


def packed_view(x, w, *, heads_outside=False):
    batch, s, _ = x.shape
    if heads_outside:
        qkv = (x @ w).view(batch, s, 4, 3, 8).permute(3, 0, 2, 1, 4)
    else:
        qkv = (x @ w).view(batch, s, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return attend(*qkv.unbind(0)).transpose(1, 2).reshape(batch, s, 32)


def packed_chunks(x, w, *, order=(0, 1, 2)):
    parts = (x @ w).chunk(3, dim=-1)
    q, k, v = (parts[i].view(*x.shape[:2], 4, 8).transpose(1, 2) for i in order)
    return attend(q, k, v).transpose(1, 2).reshape(x.shape)


def cross(x, w, k, v, *, last=None):
    """Keys and values come in from a cache; no projection of theirs is in sight."""
    q = (x @ w).view(*x.shape[:2], 4, 8).transpose(1, 2)
    weights = torch.softmax(q @ k.mT / ROOT, -1)
    return weights[..., :last] @ v[..., :last, :]


def with_weights(q, k, v, *, threshold=None):
    weights = torch.softmax(q @ k.mT / ROOT, -1)
    if threshold is not None:
        weights = weights * (weights > threshold)
    return weights @ v, weights


def talking(q, k, v, mix, *, mixed=False):
    """The twin mixes the weights of heads."""
    weights = torch.softmax(q @ k.mT / ROOT, -1)
    if mixed:
        weights = torch.einsum("hg,bgqk->bhqk", mix, weights)
    return weights @ v


def heads(num_heads, num_kv_heads):
    def draw(s, t):
        kv = (2, num_kv_heads, t, 8)
        return normal(2, num_heads, s, 8), normal(*kv), normal(*kv)

    return draw


def packed(s, _):
    return normal(2, s, 32), normal(32, 96) / 6


def _unpacked(*order):
    def operands(x, w):
        parts = (x @ w).chunk(3, dim=-1)
        return tuple(parts[i].view(*x.shape[:2], 4, 8).transpose(1, 2) for i in order)

    return operands


def _by_head(x, w):
    return (x @ w).view(*x.shape[:2], 4, 3, 8).transpose(1, 2).unbind(3)


def _merged(out):
    return out.transpose(1, 2).flatten(2)


def _tiled(times):
    return lambda q, k, v: (q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1))


def _flipped(x):
    return x.flip(1)


def _pairs(change):
    return lambda q, k, v: (q, stacked(k, k), stacked(v, change(v)))


OWN = torch.arange(1.0, 9).view(1, 8, 1, 1)
_ROOT = Says(1 / ROOT)
_ANY_HEADS = Says(1 / ROOT, heads=None)
_GROUPED = Says(1 / ROOT, heads=(4, 2))
GROUPED = (
    Spelling(
        "GQA: expand, reshape",
        grouped_expand,
        grouped,
        _GROUPED,
        Twin({"tiled": True}, "layout", _ANY_HEADS, _tiled(2)),
    ),
    Spelling(
        "GQA: repeat_interleave",
        grouped_interleave,
        grouped,
        _GROUPED,
        Twin(
            {"tile_v": True},
            "layout",
            _ANY_HEADS,
            lambda q, k, v: (q, k.repeat_interleave(2, 1), v.repeat(1, 2, 1, 1)),
        ),
    ),
    Spelling(
        "GQA: stack of the same",
        grouped_copies,
        grouped,
        _GROUPED,
        Twin({"values": torch.negative}, "layout", _ANY_HEADS, _pairs(torch.negative)),
        knobs={"copies": stacked},
    ),
    Spelling(
        "GQA: concatenation of the same",
        grouped_copies,
        grouped,
        _GROUPED,
        Twin({"values": _flipped}, "layout", _ANY_HEADS, _pairs(_flipped)),
        knobs={"copies": concatenated},
    ),
    Spelling(
        "GQA: products of five axes",
        grouped_five_axes,
        grouped,
        _GROUPED,
        Twin({"tiled": True}, "layout", _ANY_HEADS, _tiled(2)),
    ),
    Spelling(
        "GQA: heads of a group as rows",
        grouped_rows,
        grouped,
        _ANY_HEADS,
        Twin({"axis": -2}, "softmax-axis"),
    ),
    Spelling(
        "GQA: 14 heads on 2",
        grouped_expand,
        heads(14, 2),
        Says(1 / ROOT, heads=(14, 2)),
        Twin({"flip_v": True}, "layout", _ANY_HEADS, lambda q, k, v: (q, k, v.flip(1))),
    ),
    Spelling(
        "GQA: 28 heads on 4",
        grouped_expand,
        heads(28, 4),
        Says(1 / ROOT, heads=(28, 4)),
        Twin({"tiled": True}, "layout", _ANY_HEADS, _tiled(7)),
    ),
    Spelling(
        "MQA: 8 heads on 1",
        multi_query,
        heads(8, 1),
        Says(1 / ROOT, heads=(8, 1)),
        Twin(
            {"own_values": True},
            "layout",
            _ANY_HEADS,
            lambda q, k, v: (q, k.repeat(1, 8, 1, 1), v * OWN),
        ),
    ),
    Spelling(
        "packed QKV: view, unbind",
        packed_view,
        packed,
        _ROOT,
        Twin({"heads_outside": True}, "", _ROOT, _by_head),
        _unpacked(0, 1, 2),
        _merged,
    ),
    Spelling(
        "packed QKV: chunk",
        packed_chunks,
        packed,
        _ROOT,
        Twin({"order": (2, 1, 0)}, "", _ROOT, _unpacked(2, 1, 0)),
        _unpacked(0, 1, 2),
        _merged,
    ),
    Spelling(
        "cross attention, k and v cached",
        cross,
        lambda s, t: (normal(2, s, 32), normal(32, 32) / 6, *bhsd(s, t)[1:]),
        _ROOT,
        Twin({"last": -1}, "weights-changed"),
        lambda x, w, k, v: ((x @ w).view(*x.shape[:2], 4, 8).transpose(1, 2), k, v),
    ),
    Spelling("weights returned", with_weights, bhsd, _ROOT, Twin({"threshold": 0.2}, "weights-")),
    Spelling(
        "heads not mixed",
        talking,
        lambda s, t: (*bhsd(s, t), normal(4, 4)),
        _ROOT,
        Twin({"mixed": True}, "softmax-axis"),
        lambda q, k, v, _: (q, k, v),
    ),
)
