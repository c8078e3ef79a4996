"""In torch, the ops of adjoints that the float64 twin, which reads forward functions, lacks."""

from __future__ import annotations

import torch


def _take_backward(call, args, _at):
    gy, indices, shape = args
    table, axis = torch.zeros(shape, dtype=gy.dtype), int(call.attrs["axis"] or 0) % len(shape)
    rows = gy.flatten(axis, axis + indices.ndim - 1)
    return table.index_add(axis, _inside(call, indices.flatten(), shape[axis]), rows)


def _take(call, args, _at):
    x, indices = args
    axis = int(call.attrs["axis"] or 0) % x.ndim
    rows = x.index_select(axis, _inside(call, indices.flatten(), x.shape[axis]))
    return rows.unflatten(axis, indices.shape)


def _inside(call, indices, size):
    indices = indices.long()
    modes = {"wrap": indices % size, "clip": indices.clamp(0, size - 1)}
    return modes.get(str(call.attrs["mode"]), indices)


def _scatter_elements(call, args, _at):
    return args[0].scatter_add(int(call.attrs.axis), args[1].long(), args[2])


def _std(call, args, _at):
    axis = call.attrs.axis
    dim = tuple(range(args[0].ndim)) if axis is None else [int(a) for a in axis]
    return torch.std(args[0], dim=dim, correction=0, keepdim=bool(call.attrs.keepdims))


def _softplus(call, args, _at):
    beta, threshold = float(call.attrs.beta), float(call.attrs.threshold)
    return torch.nn.functional.softplus(args[0], beta, threshold)


RULES = {
    "relax.take": _take,
    "relax.sits.take_backward": _take_backward,
    "relax.scatter_elements": _scatter_elements,
    "relax.nn.softplus": _softplus,
    "relax.std": _std,
    "relax.outer": lambda call, args, _at: torch.outer(*args),
    "relax.einsum": lambda call, args, _at: torch.einsum(str(call.attrs.subscripts), *args[0]),
}
