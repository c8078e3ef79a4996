"""Converters of slices, gathers and scatters. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
from tvm import relax, tirx
from tvm.relax import op as R

from ._torch_helpers import (
    Node,
    arg,
    cast,
    emit,
    operand,
)

# Indexing: TVM's gathers read outside the tensor for a negative index.


def _select(node: Node, imp: Any) -> relax.Expr:
    x, axis, index = imp.env[node.args[0]], node.args[1], node.args[2]
    index = imp.env[index] if isinstance(index, Node) else index
    if isinstance(index, int) and index < 0:
        index = x.ty.shape[axis] + index
    return emit(imp, R.take(x, relax.prim_value(index), axis))


def _slice(node: Node, imp: Any) -> relax.Expr:
    """x[start:end:step]; the number of elements is torch's, so the end is start + length."""
    x, want = imp.env[node.args[0]], imp.types.of(node.meta["val"])
    axis = arg(node, 1, "dim", 0) % x.ty.ndim
    start, step = arg(node, 2, "start", None), arg(node, 4, "step", 1)
    start = imp.env[start] if isinstance(start, Node) else start or 0
    size, length = x.ty.shape[axis], want.shape[axis]
    if step == 1 and tvm.sym.Analyzer().can_prove_equal(size, length):
        return x
    if isinstance(start, int) and start < 0:
        start = tirx.max(size + start, tirx.IntImm("int64", 0))
    start = tvm.sym.Analyzer().simplify(tirx.IntImm("int64", 0) + start)
    end = tvm.sym.Analyzer().simplify(start + length * step)
    return emit(imp, R.strided_slice(x, [axis], [start], [end], [step], assume_inbound=True))


def _scatter_add(node: Node, imp: Any) -> relax.Expr:
    x, axis, index, source = node.args[:4]
    args = (imp.env[arg] for arg in (x, index, source))
    return emit(imp, R.scatter_elements(*args, axis=axis, reduction="add"))


def _embedding(node: Node, imp: Any) -> relax.Expr:
    weight, index = (imp.env[arg] for arg in node.args[:2])
    return emit(imp, R.take(weight, index, axis=0))


def _take(node: Node, imp: Any) -> relax.Expr:
    flat = emit(imp, R.reshape(imp.env[node.args[0]], [-1]))
    return emit(imp, R.take(flat, _wrapped(imp, node.args[1], flat.ty.shape[0]), axis=0))


def _index(node: Node, imp: Any) -> relax.Expr:
    """x[i, :, j]: index tensors broadcast together; their axes come first unless adjacent."""
    x, indices = imp.env[node.args[0]], node.args[1]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    _refuse_masks(imp, [indices[axis] for axis in axes])
    wrapped = [_wrapped(imp, indices[axis], x.ty.shape[axis]) for axis in axes]
    if len(axes) == 1:
        return emit(imp, R.take(x, wrapped[0], axis=axes[0]))
    others = [axis for axis in range(x.ty.ndim) if axis not in axes]
    if axes != list(range(len(axes))):
        x = emit(imp, R.permute_dims(x, axes + others))
    out = emit(imp, R.index_tensor(x, wrapped))
    if axes != list(range(axes[0], axes[-1] + 1)) or axes[0] == 0:
        return out
    width = out.ty.ndim - len(others)
    order = list(range(out.ty.ndim))
    head, rest = order[:width], order[width:]
    return emit(imp, R.permute_dims(out, rest[: axes[0]] + head + rest[axes[0] :]))


def _index_put(node: Node, imp: Any) -> relax.Expr:
    """x[i, :, j] = v: the indexed axes go first, then scatter_nd, then they go back."""
    x, indices, values = imp.env[node.args[0]], node.args[1], imp.env[node.args[2]]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    _refuse_masks(imp, [indices[axis] for axis in axes])
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise ValueError("x[i, :, j] = v with a slice between the indices; index adjacent axes")
    wrapped = [_wrapped(imp, indices[axis], x.ty.shape[axis]) for axis in axes]
    shape = list(_broadcast(node, [indices[axis] for axis in axes], imp))
    order = axes + [axis for axis in range(x.ty.ndim) if axis not in axes]
    moved = emit(imp, R.permute_dims(x, order))
    rest = list(moved.ty.shape)[len(axes) :]
    updates = _updates(imp, values, shape, rest, axes[0])
    columns = [emit(imp, R.broadcast_to(cast(imp, w, "int64"), shape)) for w in wrapped]
    reduction = "add" if arg(node, 3, "accumulate", False) else "update"
    stacked = emit(imp, R.stack(columns, axis=-1))
    out = emit(imp, R.scatter_nd(moved, stacked, updates, reduction))
    return emit(imp, R.permute_dims(out, [order.index(axis) for axis in range(x.ty.ndim)]))


def _broadcast(node: Node, indices: list[Node], imp: Any) -> tuple[Any, ...]:
    shape = torch.broadcast_shapes(*[index.meta["val"].shape for index in indices])
    return tuple(imp.types.dim(d) for d in shape)


def _updates(imp: Any, values: relax.Expr, shape: list, rest: list, lead: int) -> relax.Expr:
    """`values` broadcast to the shape of x[:, i], with the `lead` axes before i moved behind it."""
    full = rest[:lead] + shape + rest[lead:]
    values = emit(imp, R.broadcast_to(values, full))
    order = [*range(lead, lead + len(shape)), *range(lead), *range(lead + len(shape), len(full))]
    return emit(imp, R.permute_dims(values, order))


def _refuse_masks(imp: Any, indices: list[Node]) -> None:
    if any(imp.env[index].ty.dtype in ("bool", "uint8") for index in indices):
        raise ValueError("a bool mask selects a number of elements unknown here; use torch.where")


def _wrapped(imp: Any, index: Node, size: Any) -> relax.Expr:
    """`index` with `size` added where it is negative; left alone where it cannot be."""
    value = imp.env[index]
    if _is_nonnegative(index):
        return value
    size = operand(imp, size if not isinstance(size, tirx.IntImm) else int(size), "int64")
    value = cast(imp, value, "int64")
    is_negative = emit(imp, R.less(value, relax.const(0, "int64")))
    return emit(imp, R.where(is_negative, emit(imp, R.add(value, size)), value))


def _is_nonnegative(index: Node) -> bool:
    """Whether `index` is arange(start ≥ 0, …) seen through views and additions of such."""
    name = getattr(index.target, "__name__", "")
    args = [a for a in index.args if isinstance(a, Node)]
    if name.startswith("arange"):
        start = index.args[0] if len(index.args) > 1 else 0
        step = index.args[2] if len(index.args) > 2 else 1
        return isinstance(start, int) and start >= 0 and isinstance(step, int) and step > 0
    if name in _VIEWS:
        return _is_nonnegative(args[0])
    if name == "add.Tensor":
        return (
            all(_is_nonnegative(a) if isinstance(a, Node) else a >= 0 for a in index.args[:2])
            and index.kwargs.get("alpha", 1) >= 0
        )
    return False


_VIEWS = ("unsqueeze.default", "view.default", "expand.default", "squeeze.dim", "permute.default")

INDEXING: dict[str, Callable[[Node, Any], Any]] = {
    "select.int": _select,
    "slice.Tensor": _slice,
    "scatter_add.default": _scatter_add,
    "embedding.default": _embedding,
    "take.default": _take,
    "index.Tensor": _index,
    "index_put.default": _index_put,
}
