"""Our converters, where TVM's importer is missing one or its own is wrong.

Each takes a node of the exported graph and the importer: ``importer.env`` maps nodes to Relax
expressions, ``importer.block_builder`` emits. ``node.meta["val"]`` is torch's word on the result.
Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
from tvm import relax, tirx
from tvm.relax import op as R

from relax_passes.op import attention

Node = torch.fx.Node


# Matrix products: TVM's importer computes them all in float32, whatever the dtype of the model.


def _matmul(node: Node, imp: Any) -> relax.Expr:
    return _emit(imp, R.matmul(imp.env[node.args[0]], imp.env[node.args[1]]))


def _linear(node: Node, imp: Any) -> relax.Expr:
    x, weight, *bias = (imp.env[a] for a in node.args if a is not None)
    axes = None if weight.ty.ndim == 2 else [0]
    out = _emit(imp, R.matmul(x, _emit(imp, R.permute_dims(weight, axes))))
    return _emit(imp, R.add(out, bias[0])) if bias else out


def _addmm(node: Node, imp: Any) -> relax.Expr:
    """beta · x + alpha · a b; beta = 0 ignores x, as torch does."""
    x, a, b = (imp.env[arg] for arg in node.args[:3])
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    product = _scaled(imp, _emit(imp, R.matmul(a, b)), alpha)
    if beta != 0:
        return _emit(imp, R.add(_scaled(imp, x, beta), product))
    return product


def _attention(node: Node, imp: Any) -> relax.Expr:
    """`scaled_dot_product_attention` of rank 2 to 4 as `relax.sits.attention`."""
    q, k, v = (imp.env[arg] for arg in node.args[:3])
    mask, dropout, is_causal = (_arg(node, i, n, d) for i, n, d in _SDPA_ARGS)
    scale, grouped = node.kwargs.get("scale"), node.kwargs.get("enable_gqa", False)
    if dropout:
        raise ValueError(f"dropout_p={dropout} acts at random; call model.eval() before the export")
    ranks = {x.ty.ndim for x in (q, k, v)}
    if len(ranks) > 1 or not ranks <= {2, 3, 4}:
        raise ValueError(f"q, k, v of ranks {sorted(ranks)}; write rank 4, (B, H, S, D)")
    q, k, v = (_leading_ones(imp, x, 4 - x.ty.ndim) for x in (q, k, v))
    if not grouped and not tvm.sym.Analyzer().can_prove_equal(q.ty.shape[1], k.ty.shape[1]):
        raise ValueError("q and k have different numbers of heads, and enable_gqa is False")
    out = attention(
        q,
        k,
        v,
        imp.env[mask] if mask is not None else None,
        scale=scale,
        causal=0 if is_causal else None,
        empty_row="zero",
    )
    rank = ranks.pop()
    return (
        _emit(imp, out) if rank == 4 else _emit(imp, R.squeeze(_emit(imp, out), [0, 1][: 4 - rank]))
    )


_SDPA_ARGS = ((3, "attn_mask", None), (4, "dropout_p", 0.0), (5, "is_causal", False))


# Arithmetic: operands get torch's common dtype first; an integer divides to a float.


def _arithmetic(op: Callable, on_bool: Callable | None = None) -> Callable:
    def convert(node: Node, imp: Any) -> relax.Expr:
        dtype = _common_dtype(node)
        lhs, rhs = (_operand(imp, arg, dtype) for arg in node.args[:2])
        rhs = _scaled(imp, rhs, node.kwargs.get("alpha", 1))
        return _emit(imp, (on_bool if dtype == "bool" and on_bool else op)(lhs, rhs))

    return convert


def _rsub(node: Node, imp: Any) -> relax.Expr:
    alpha = _arg(node, 2, "alpha", 1)
    lhs, rhs = (_operand(imp, arg, _common_dtype(node)) for arg in node.args[:2])
    return _emit(imp, R.subtract(rhs, _scaled(imp, lhs, alpha)))


def _divide(node: Node, imp: Any) -> relax.Expr:
    mode = node.kwargs.get("rounding_mode")
    dtype = _common_dtype(node) if mode else _result_dtype(node)
    lhs, rhs = (_operand(imp, arg, dtype) for arg in node.args[:2])
    if mode == "floor":
        return _emit(imp, R.floor_divide(lhs, rhs))
    quotient = _emit(imp, R.divide(lhs, rhs))
    is_float = "float" in dtype
    return _emit(imp, R.trunc(quotient)) if mode == "trunc" and is_float else quotient


def _clamp(node: Node, imp: Any) -> relax.Expr:
    dtype = _result_dtype(node)
    x = _cast(imp, imp.env[node.args[0]], dtype)
    for position, (name, bound) in enumerate((("min", R.maximum), ("max", R.minimum)), 1):
        limit = _arg(node, position, name, None)
        if limit is not None:
            x = _emit(imp, bound(x, _operand(imp, limit, dtype)))
    return x


def _where(node: Node, imp: Any) -> relax.Expr:
    dtype = _result_dtype(node)
    x, y = (_operand(imp, arg, dtype) for arg in node.args[1:3])
    return _emit(imp, R.where(imp.env[node.args[0]], x, y))


# Reductions: torch adds up bool and narrow integers in int64.


def _cumulative(op: Callable) -> Callable:
    def convert(node: Node, imp: Any) -> relax.Expr:
        node.kwargs.get("dtype")  # torch already applied it to the type of the result
        x = _cast(imp, imp.env[node.args[0]], _result_dtype(node))
        if x.ty.ndim == 0:
            return x
        return _emit(imp, op(x, _arg(node, 1, "dim", 0)))

    return convert


def _reduction(op: Callable) -> Callable:
    """(x, dim=None, keepdim=False, dtype=None), computed in the dtype of the result."""

    def convert(node: Node, imp: Any) -> relax.Expr:
        node.kwargs.get("dtype")
        x = _cast(imp, imp.env[node.args[0]], _result_dtype(node))
        dim = _arg(node, 1, "dim", None)
        axis = None if dim is None or dim == [] else dim
        return _emit(imp, op(x, axis, keepdims=_arg(node, 2, "keepdim", False)))

    return convert


def _extreme(op: Callable) -> Callable:
    """amax, amin; a bool goes through int8, which has a smallest value."""

    def convert(node: Node, imp: Any) -> relax.Expr:
        x, dtype = imp.env[node.args[0]], _result_dtype(node)
        x = _cast(imp, x, "int8") if dtype == "bool" else x
        axis = _arg(node, 1, "dim", None) or None
        return _cast(imp, _emit(imp, op(x, axis, _arg(node, 2, "keepdim", False))), dtype)

    return convert


def _smallest(node: Node, imp: Any) -> relax.Expr:
    """min along one axis: values and positions."""
    x, axis = imp.env[node.args[0]], node.args[1]
    keep = _arg(node, 2, "keepdim", False)
    return relax.Tuple([_emit(imp, R.min(x, axis, keep)), _emit(imp, R.argmin(x, axis, keep))])


def _any(node: Node, imp: Any) -> relax.Expr:
    x = _cast(imp, _cast(imp, imp.env[node.args[0]], "bool"), "int8")
    dim = _arg(node, 1, "dim", None)
    axis = None if dim is None or dim == [] else dim
    return _cast(imp, _emit(imp, R.max(x, axis, _arg(node, 2, "keepdim", False))), "bool")


# Indexing: TVM's gathers read outside the tensor for a negative index.


def _select(node: Node, imp: Any) -> relax.Expr:
    x, axis, index = imp.env[node.args[0]], node.args[1], node.args[2]
    index = imp.env[index] if isinstance(index, Node) else index
    if isinstance(index, int) and index < 0:
        index = x.ty.shape[axis] + index
    return _emit(imp, R.take(x, relax.prim_value(index), axis))


def _slice(node: Node, imp: Any) -> relax.Expr:
    """x[start:end:step]; the number of elements is torch's, so the end is start + length."""
    x, want = imp.env[node.args[0]], imp.type_of(node.meta["val"])
    axis = _arg(node, 1, "dim", 0) % x.ty.ndim
    start, step = _arg(node, 2, "start", None), _arg(node, 4, "step", 1)
    start = imp.env[start] if isinstance(start, Node) else start or 0
    size, length = x.ty.shape[axis], want.shape[axis]
    if step == 1 and tvm.sym.Analyzer().can_prove_equal(size, length):
        return x
    if isinstance(start, int) and start < 0:
        start = tirx.max(size + start, tirx.IntImm("int64", 0))
    start = tvm.sym.Analyzer().simplify(tirx.IntImm("int64", 0) + start)
    end = tvm.sym.Analyzer().simplify(start + length * step)
    return _emit(imp, R.strided_slice(x, [axis], [start], [end], [step], assume_inbound=True))


def _scatter_add(node: Node, imp: Any) -> relax.Expr:
    x, axis, index, source = node.args[:4]
    args = (imp.env[arg] for arg in (x, index, source))
    return _emit(imp, R.scatter_elements(*args, axis=axis, reduction="add"))


def _embedding(node: Node, imp: Any) -> relax.Expr:
    weight, index = (imp.env[arg] for arg in node.args[:2])
    return _emit(imp, R.take(weight, index, axis=0))


def _take(node: Node, imp: Any) -> relax.Expr:
    flat = _emit(imp, R.reshape(imp.env[node.args[0]], [-1]))
    return _emit(imp, R.take(flat, _wrapped(imp, node.args[1], flat.ty.shape[0]), axis=0))


def _index(node: Node, imp: Any) -> relax.Expr:
    """x[i, :, j]: index tensors broadcast together; their axes come first unless adjacent."""
    x, indices = imp.env[node.args[0]], node.args[1]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    _refuse_masks(imp, [indices[axis] for axis in axes])
    wrapped = [_wrapped(imp, indices[axis], x.ty.shape[axis]) for axis in axes]
    if len(axes) == 1:
        return _emit(imp, R.take(x, wrapped[0], axis=axes[0]))
    others = [axis for axis in range(x.ty.ndim) if axis not in axes]
    if axes != list(range(len(axes))):
        x = _emit(imp, R.permute_dims(x, axes + others))
    out = _emit(imp, R.index_tensor(x, wrapped))
    if axes != list(range(axes[0], axes[-1] + 1)) or axes[0] == 0:
        return out
    width = out.ty.ndim - len(others)
    order = list(range(out.ty.ndim))
    head, rest = order[:width], order[width:]
    return _emit(imp, R.permute_dims(out, rest[: axes[0]] + head + rest[axes[0] :]))


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
    moved = _emit(imp, R.permute_dims(x, order))
    rest = list(moved.ty.shape)[len(axes) :]
    updates = _updates(imp, values, shape, rest, axes[0])
    columns = [_emit(imp, R.broadcast_to(_cast(imp, w, "int64"), shape)) for w in wrapped]
    reduction = "add" if _arg(node, 3, "accumulate", False) else "update"
    stacked = _emit(imp, R.stack(columns, axis=-1))
    out = _emit(imp, R.scatter_nd(moved, stacked, updates, reduction))
    return _emit(imp, R.permute_dims(out, [order.index(axis) for axis in range(x.ty.ndim)]))


def _broadcast(node: Node, indices: list[Node], imp: Any) -> tuple[Any, ...]:
    shape = torch.broadcast_shapes(*[index.meta["val"].shape for index in indices])
    return tuple(imp.dim(d) for d in shape)


def _updates(imp: Any, values: relax.Expr, shape: list, rest: list, lead: int) -> relax.Expr:
    """`values` broadcast to the shape of x[:, i], with the `lead` axes before i moved behind it."""
    full = rest[:lead] + shape + rest[lead:]
    values = _emit(imp, R.broadcast_to(values, full))
    order = [*range(lead, lead + len(shape)), *range(lead), *range(lead + len(shape), len(full))]
    return _emit(imp, R.permute_dims(values, order))


def _refuse_masks(imp: Any, indices: list[Node]) -> None:
    if any(imp.env[index].ty.dtype in ("bool", "uint8") for index in indices):
        raise ValueError("a bool mask selects a number of elements unknown here; use torch.where")


# Modes that change what an op does.


def _identity_unless_training(node: Node, imp: Any) -> relax.Expr:
    probability, training = _arg(node, 1, "p", 0.5), _arg(node, 2, "train", False)
    if training and probability:
        raise ValueError(f"dropout of p={probability} in training mode; call model.eval() before")
    return imp.env[node.args[0]]


def _refuse_random(node: Node, imp: Any) -> relax.Expr:
    raise ValueError("a random result cannot be compiled; pass it as an input")


# Helpers


def _emit(imp: Any, expr: relax.Expr) -> relax.Expr:
    return imp.block_builder.emit(expr)


def _arg(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _cast(imp: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    return x if x.ty.dtype == dtype else _emit(imp, R.astype(x, dtype))


def _scaled(imp: Any, x: relax.Expr, factor: float) -> relax.Expr:
    if factor == 1:
        return x
    return _emit(imp, R.multiply(x, relax.const(factor, str(x.ty.dtype))))


def _leading_ones(imp: Any, x: relax.Expr, count: int) -> relax.Expr:
    return _emit(imp, R.expand_dims(x, list(range(count)))) if count else x


def _result_dtype(node: Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def _common_dtype(node: Node) -> str:
    """Of the two operands, by torch's promotion."""
    values = [a.meta["val"] if isinstance(a, Node) else a for a in node.args[:2]]
    stand_ins = [_NUMBER.get(type(v), v) for v in values]
    return str(torch.result_type(*stand_ins)).removeprefix("torch.")


_NUMBER: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}


def _operand(imp: Any, arg: Any, dtype: str) -> relax.Expr:
    value = imp.env[arg] if isinstance(arg, Node) else arg
    if isinstance(value, bool | int | float):
        return relax.const(value, dtype)
    if isinstance(value.ty, relax.TensorType):
        return _cast(imp, value, dtype)
    shape = _emit(imp, relax.ShapeExpr([value]))
    tensor = _emit(imp, R.reshape(_emit(imp, R.shape_to_tensor(shape)), []))
    return _cast(imp, tensor, dtype)


def _wrapped(imp: Any, index: Node, size: Any) -> relax.Expr:
    """`index` with `size` added where it is negative; left alone where it cannot be."""
    value = imp.env[index]
    if _is_nonnegative(index):
        return value
    size = _operand(imp, size if not isinstance(size, tirx.IntImm) else int(size), "int64")
    value = _cast(imp, value, "int64")
    is_negative = _emit(imp, R.less(value, relax.const(0, "int64")))
    return _emit(imp, R.where(is_negative, _emit(imp, R.add(value, size)), value))


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

_COMPARISONS = {
    "eq": R.equal,
    "ne": R.not_equal,
    "lt": R.less,
    "le": R.less_equal,
    "gt": R.greater,
    "ge": R.greater_equal,
}
_ARITHMETIC = {
    "add": _arithmetic(R.add, R.logical_or),
    "sub": _arithmetic(R.subtract),
    "mul": _arithmetic(R.multiply, R.logical_and),
    "rsub": _rsub,
    "div": _divide,
    "remainder": _arithmetic(R.floor_mod),
    "fmod": _arithmetic(R.mod),
    **{name: _arithmetic(op) for name, op in _COMPARISONS.items()},
}

CONVERTERS: dict[str, Callable[[Node, Any], Any]] = {
    **{f"{name}.{kind}": f for name, f in _ARITHMETIC.items() for kind in ("Tensor", "Scalar")},
    "div.Tensor_mode": _divide,
    "div.Scalar_mode": _divide,
    "floor_divide.default": _arithmetic(R.floor_divide),
    "maximum.default": _arithmetic(R.maximum, R.logical_or),
    "minimum.default": _arithmetic(R.minimum, R.logical_and),
    **{f"__lshift__.{kind}": _arithmetic(R.left_shift) for kind in ("Tensor", "Scalar")},
    **{f"__rshift__.{kind}": _arithmetic(R.right_shift) for kind in ("Tensor", "Scalar")},
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "where.self": _where,
    "where.ScalarOther": _where,
    "where.ScalarSelf": _where,
    "matmul.default": _matmul,
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "mv.default": _matmul,
    "dot.default": _matmul,
    "linear.default": _linear,
    "addmm.default": _addmm,
    "baddbmm.default": _addmm,
    "scaled_dot_product_attention.default": _attention,
    "cumsum.default": _cumulative(R.cumsum),
    "cumprod.default": _cumulative(R.cumprod),
    "sum.default": _reduction(R.sum),
    "sum.dim_IntList": _reduction(R.sum),
    "prod.default": _reduction(R.prod),
    "prod.dim_int": _reduction(R.prod),
    "amax.default": _extreme(R.max),
    "amin.default": _extreme(R.min),
    "max.default": _extreme(R.max),
    "min.default": _extreme(R.min),
    "min.dim": _smallest,
    "any.default": _any,
    "any.dim": _any,
    "any.dims": _any,
    "select.int": _select,
    "slice.Tensor": _slice,
    "scatter_add.default": _scatter_add,
    "embedding.default": _embedding,
    "take.default": _take,
    "index.Tensor": _index,
    "index_put.default": _index_put,
    "dropout.default": _identity_unless_training,
    "native_dropout.default": _identity_unless_training,
    **dict.fromkeys(("bernoulli.p", "randn.default", "randn_like.default"), _refuse_random),
}
