"""Ops and their torch equivalents, with inputs at which their gradients are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tvm import relax, tirx
from tvm.relax import op as R

from relax_passes.op import attention

F = torch.nn.functional
N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
_RNG = np.random.default_rng(0)
LAST = (1 << 63) - 1


@dataclass(frozen=True)
class Case:
    """``ours(bb, *vars)`` and ``theirs(*tensors)``, at `arrays`; `shapes` may be symbolic."""

    ours: Callable
    theirs: Callable
    arrays: tuple
    shapes: tuple

    @property
    def is_symbolic(self) -> bool:
        return any(isinstance(d, tirx.Var) for shape in self.shapes for d in shape)


CASES: dict[str, Case] = {}


def case(name, ours, theirs, *arrays, shapes=None):
    CASES[name] = Case(ours, theirs, arrays, tuple(shapes or [a.shape for a in arrays]))


def draw(*shape):
    return _RNG.standard_normal(shape).astype("float32")


X, Y, W = draw(3, 8), draw(3, 8), draw(8, 5)
POSITIVE, INSIDE, TIED = np.abs(X) + 0.5, np.tanh(X) * 0.9, np.round(X)
ROWS = [N, 8]  # the symbolic shape of X


def chain(f):
    return lambda bb, *xs: f(*xs)


def take(x, indices, axis=None, mode="fast"):
    return R.take(x, relax.const(indices, "int64"), axis, mode)


for _name, _ours, _theirs, _other, _shape in [
    ("add", R.add, torch.add, X[0], [8]),
    ("subtract", R.subtract, torch.sub, X[:, :1].copy(), [N, 1]),
    ("multiply", R.multiply, torch.mul, X[0], [8]),
    ("divide", R.divide, torch.div, POSITIVE[0], [8]),
    ("maximum_tied", R.maximum, torch.maximum, np.round(Y), ROWS),
    ("minimum_tied", R.minimum, torch.minimum, np.round(Y), ROWS),
]:
    case(_name, chain(_ours), _theirs, TIED, _other, shapes=[ROWS, _shape])

case("power", chain(R.power), torch.pow, POSITIVE, X[0], shapes=[ROWS, [8]])
for _e in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0):
    case(
        f"power_{_e}",
        lambda bb, x, e=_e: R.power(x, relax.const(e, "float32")),
        lambda x, e=_e: x**e,
        POSITIVE if _e in (0.5, -1.0) else TIED,
        shapes=[ROWS],
    )
case(
    "where_broadcast",
    lambda bb, x, y: R.where(bb.emit(R.greater(x, relax.const(0, "float32"))), x, y),
    lambda x, y: torch.where(x > 0, x, y),
    X,
    Y[0],
    shapes=[ROWS, [8]],
)
for _name, _ours, _theirs, _x in [
    ("abs_at_zero", R.abs, torch.abs, np.where(X > 0.5, X, 0).astype("float32")),
    ("rsqrt", R.rsqrt, torch.rsqrt, POSITIVE),
    ("square", R.square, torch.square, X),
    ("erf", R.erf, torch.erf, X),
    ("tan", R.tan, torch.tan, INSIDE),
    ("asin", R.asin, torch.asin, INSIDE),
    ("acos", R.acos, torch.acos, INSIDE),
    ("atan", R.atan, torch.atan, X),
    ("asinh", R.asinh, torch.asinh, X),
    ("acosh", R.acosh, torch.acosh, POSITIVE + 1),
    ("atanh", R.atanh, torch.atanh, INSIDE),
    ("exp", R.exp, torch.exp, X),
    ("log", R.log, torch.log, POSITIVE),
    ("sqrt", R.sqrt, torch.sqrt, POSITIVE),
    ("sigmoid", R.sigmoid, torch.sigmoid, X),
    ("tanh", R.tanh, torch.tanh, X),
    ("cos", R.cos, torch.cos, X),
    ("negative", R.negative, torch.neg, X),
    ("relu_at_zero", R.nn.relu, torch.relu, TIED),
    ("leakyrelu", lambda x: R.nn.leakyrelu(x, 0.1), lambda x: F.leaky_relu(x, 0.1), TIED),
    ("softplus", lambda x: R.nn.softplus(x, 2.0, 1.0), lambda x: F.softplus(x, 2.0, 1.0), X),
    ("silu", R.nn.silu, F.silu, X),
    ("gelu", R.nn.gelu, F.gelu, X * 2),
    ("gelu_tanh", R.nn.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), X * 2),
    ("softmax", lambda x: R.nn.softmax(x, -1), lambda x: x.softmax(-1), X),
    ("softmax_rows", lambda x: R.nn.softmax(x, 0), lambda x: x.softmax(0), X),
    ("log_softmax", lambda x: R.nn.log_softmax(x, -1), lambda x: x.log_softmax(-1), X),
    ("widening", lambda x: R.astype(x, "float64"), lambda x: x.double(), X),
]:
    case(_name, chain(_ours), _theirs, _x, shapes=[ROWS])

for _axis, _dim in [(None, (0, 1)), (0, 0), (-1, -1), ([0, 1], (0, 1))]:
    for _keep in (False, True):
        for _name, _theirs in [
            ("sum", torch.sum),
            ("mean", torch.mean),
            ("max", torch.amax),
            ("min", torch.amin),
            ("variance", lambda x, **o: torch.var(x, correction=0, **o)),
            ("std", lambda x, **o: torch.std(x, correction=0, **o)),
        ]:
            case(
                f"{_name}_{_axis}_{_keep}",
                lambda bb, x, f=_name, a=_axis, k=_keep: getattr(R, f)(x, a, k),
                lambda x, f=_theirs, d=_dim, k=_keep: f(x, dim=d, keepdim=k),
                TIED if _name in ("max", "min") else X,
                shapes=[ROWS],
            )

case("broadcast_to", lambda bb, x: R.broadcast_to(x, (2, 3, 8)), lambda x: x.expand(2, 3, 8), Y[:1])
case(
    "broadcast_to_symbol",
    lambda bb, x, y: R.multiply(bb.emit(R.broadcast_to(x, relax.ShapeExpr(ROWS))), y),
    lambda x, y: x.expand(3, 8) * y,
    X[:1],
    Y,
    shapes=[[1, 8], ROWS],
)
for _name, _ours, _theirs in [
    ("reshape_product", lambda bb, x: R.reshape(x, (N * 2, 4)), lambda x: x.reshape(-1, 4)),
    ("flatten", lambda bb, x: R.flatten(x), torch.flatten),
    ("expand_dims", lambda bb, x: R.expand_dims(x, [0, -1]), lambda x: x[None, ..., None]),
    (
        "permute_dims",
        lambda bb, x: R.permute_dims(bb.emit(R.expand_dims(x, 0)), [-1, 0, 1]),
        lambda x: x[None].permute(-1, 0, 1),
    ),
    (
        "split_one",
        lambda bb, x: relax.TupleGetItem(bb.emit(R.split(x, 4, 1)), 1),
        lambda x: x.split(2, 1)[1],
    ),
    ("flip", lambda bb, x: R.flip(x, 1), lambda x: x.flip(1)),
    ("tril", lambda bb, x: R.tril(x, 1), lambda x: x.tril(1)),
    ("triu", lambda bb, x: R.triu(x, 1), lambda x: x.triu(1)),
    ("repeat", lambda bb, x: R.repeat(x, 3, 1), lambda x: x.repeat_interleave(3, 1)),
    ("repeat_all", lambda bb, x: R.repeat(x, 3), lambda x: x.repeat_interleave(3)),
    ("tile_more", lambda bb, x: R.tile(x, [2, 1, 3]), lambda x: x.tile(2, 1, 3)),
    ("tile_less", lambda bb, x: R.tile(x, [3]), lambda x: x.tile(3)),
    (
        "slice_symbol",
        lambda bb, x: R.strided_slice(x, [0], [1], [N], assume_inbound=True),
        lambda x: x[1:],
    ),
    ("take_columns", lambda bb, x: take(x, [[0, 2], [2, 1]], 1), lambda x: x[:, [[0, 2], [2, 1]]]),
    ("take_last", lambda bb, x: take(x, [7, 1, 7], -1), lambda x: x[:, [7, 1, 7]]),
]:
    case(_name, _ours, _theirs, X, shapes=[ROWS])


case(
    "concat_rows",
    lambda bb, x, y: R.concat([x, y, x], 0),
    lambda x, y: torch.cat([x, y, x]),
    X,
    Y[:2],
    shapes=[ROWS, [M, 8]],
)
case(
    "concat_last",
    lambda bb, x, y: R.concat([x, y], -1),
    lambda x, y: torch.cat([x, y], -1),
    X,
    Y[:, :3].copy(),
    shapes=[ROWS, [N, 3]],
)
case(
    "split_two",
    lambda bb, x: (lambda parts: R.multiply(*(bb.emit(parts[i]) for i in (0, 2))))(
        bb.emit(R.split(x, [3, 5], 1))
    ),
    lambda x: x[:, :3] * x[:, 5:],
    X,
    shapes=[ROWS],
)
case(
    "stack",
    lambda bb, x, y: R.stack([x, y], 1),
    lambda x, y: torch.stack([x, y], 1),
    X,
    Y,
    shapes=[ROWS, ROWS],
)
for _axis, _begin, _end, _stride in [
    (1, 2, 6, 1),
    (1, 0, LAST, 2),
    (1, 1, 8, 3),
    (1, -3, LAST, 1),
    (-1, 1, -2, 3),
    (0, 1, LAST, 1),
    (1, -1, -LAST, -1),
    (1, 6, 0, -2),
    (1, 2, 100, 4),
]:
    _picked = range(X.shape[_axis])[slice(_begin, None if abs(_end) == LAST else _end, _stride)]
    case(
        f"slice_{_axis}_{_begin}_{'' if abs(_end) == LAST else _end}_{_stride}",
        lambda bb, x, a=_axis, b=_begin, e=_end, s=_stride: R.strided_slice(x, [a], [b], [e], [s]),
        lambda x, a=_axis, i=list(_picked): x.index_select(a, torch.tensor(i)),
        X,
    )
case(
    "slice_two_axes",
    lambda bb, x: R.strided_slice(x, [0, 1], [1, 2], [3, 8], [1, 2]),
    lambda x: x[1:3, 2:8:2],
    X,
)

case("squeeze", lambda bb, x: R.squeeze(bb.emit(R.expand_dims(x, [0, 2]))), lambda x: x + 0, X)

A, B, V = draw(2, 3, 8), draw(2, 8, 4), W[:, 0].copy()
for _name, _a, _b, _shapes in [
    ("2x2", X, W, [ROWS, [8, 5]]),
    ("3x2", A, W, [[M, N, 8], [8, 5]]),
    ("3x2_static", A, W, None),
    ("3x3", A, B, [[M, N, 8], [M, 8, 4]]),
    ("2x3", X, B, [ROWS, [M, 8, 4]]),
    ("broadcast", A[:, None].copy(), B[None].copy(), None),
    ("1x2", X[0], W, None),
    ("2x1", X, V, [ROWS, [8]]),
    ("1x1", X[0], V, None),
    ("3x1", A, V, None),
    ("1x3", X[0], B, None),
]:
    case(f"matmul_{_name}", chain(R.matmul), torch.matmul, _a, _b, shapes=_shapes)
case("outer", chain(R.outer), torch.outer, X[0], V)
for _subscripts, _b in [("bnk,bkm->bnm", B), ("bnk,km->mb", W)]:
    case(
        f"einsum_{_subscripts}",
        lambda bb, x, y, s=_subscripts: R.einsum([x, y], s),
        lambda x, y, s=_subscripts: torch.einsum(s, x, y),
        A,
        _b,
    )

_IDS = [[0, 2, 2], [1, 0, 2]]
case("take_rows", lambda bb, x: take(x, _IDS, 0), lambda x: x[torch.tensor(_IDS)], X)
case("take_vector", lambda bb, x: take(x, _IDS), lambda x: x[torch.tensor(_IDS)], X[0])
case("take_wrap", lambda bb, x: take(x, [-1, 3, 5], 0, "wrap"), lambda x: x[[2, 0, 2]], X)
case("take_clip", lambda bb, x: take(x, [-1, 3, 1], 0, "clip"), lambda x: x[[0, 2, 1]], X)
case(
    "gather_elements",
    lambda bb, x: R.gather_elements(x, relax.const(_IDS, "int64"), 1),
    lambda x: x.gather(1, torch.tensor(_IDS)),
    X[:2],
)

GAMMA, BETA = POSITIVE[0], Y[1]
case(
    "layer_norm",
    lambda bb, x, g, b: R.nn.layer_norm(x, g, b, [-1], 1e-5),
    lambda x, g, b: F.layer_norm(x, (8,), g, b, 1e-5),
    X,
    GAMMA,
    BETA,
    shapes=[ROWS, [8], [8]],
)
case(
    "layer_norm_two_axes",
    lambda bb, x, g, b: R.nn.layer_norm(x, g, b, [-2, -1], 1e-5),
    lambda x, g, b: F.layer_norm(x, (3, 8), g, b, 1e-5),
    A,
    POSITIVE,
    Y,
)
case(
    "rms_norm",
    lambda bb, x, g: R.nn.rms_norm(x, g, [-1], 1e-5),
    lambda x, g: F.rms_norm(x, (8,), g, 1e-5),
    X,
    GAMMA,
    shapes=[ROWS, [8]],
)


def capped_attention(q, k, v):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * 0.3).tanh()
    visible = torch.ones(scores.shape[-2:]).tril().bool()
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


case(
    "attention",
    lambda bb, q, k, v: attention(q, k, v, scale=0.3, softcap=1.0, causal=0),
    capped_attention,
    draw(2, 4, 5, 8),
    draw(2, 2, 5, 8),
    draw(2, 2, 5, 8),
    shapes=[[M, 4, N, 8], [M, 2, N, 8], [M, 2, N, 8]],
)
case(
    "attention_of_itself",
    lambda bb, x: attention(x, x, x),
    lambda x: (x @ x.transpose(-1, -2) / 8**0.5).softmax(-1) @ x,
    draw(1, 2, 5, 8),
)


def running_sum(x, axis, exclusive):
    x = x.flatten() if axis is None else x
    total = x.cumsum(axis or 0)
    return total - x if exclusive else total


def weighted_loss(x, weights, labels, ignored, reduction):
    """nll_loss with a gradient in the weights, which torch's has not."""
    rows = [i for i, label in enumerate(labels) if label != ignored]
    kept = [labels[i] for i in rows]
    terms = -x[rows, kept] * weights[kept]
    if reduction == "none":
        return x.new_zeros(len(labels)).index_add(0, torch.tensor(rows), terms)
    return terms.sum() / (weights[kept].sum() if reduction == "mean" else 1)


_LABELS = [1, 7, 3]
case(
    "nll_loss",
    lambda bb, x: R.nn.nll_loss(bb.emit(R.nn.log_softmax(x)), relax.const(_LABELS, "int64")),
    lambda x: F.cross_entropy(x, torch.tensor(_LABELS)),
    X,
)
case(
    "cross_entropy_with_logits",
    lambda bb, x, y: R.nn.cross_entropy_with_logits(x, y),
    lambda x, y: -(x * y).sum() / 3,
    X,
    POSITIVE,
    shapes=[ROWS, ROWS],
)
_WEIGHTS = POSITIVE[2]
for _reduction in ("none", "sum", "mean"):
    for _ignored, _labels in [(-100, [1, -100, 3]), (3, [1, 7, 3])]:
        case(
            f"nll_loss_weights_{_reduction}_{_ignored}",
            lambda bb, x, w, r=_reduction, i=_ignored, t=_labels: R.nn.nll_loss(
                x, relax.const(t, "int64"), w, r, i
            ),
            lambda x, w, r=_reduction, i=_ignored, t=_labels: weighted_loss(x, w, t, i, r),
            X,
            _WEIGHTS,
            shapes=[ROWS if _reduction == "sum" else [3, 8], [8]],
        )
case(
    "nll_loss_of_maps",
    lambda bb, x: R.nn.nll_loss(x, relax.const([[1, -100], [0, 2], [1, 1]], "int64")),
    lambda x: F.nll_loss(x, torch.tensor([[1, -100], [0, 2], [1, 1]])),
    draw(3, 4, 2),
)
case(
    "nll_loss_of_one",
    lambda bb, x: R.nn.nll_loss(x, relax.const(2, "int64")),
    lambda x: F.nll_loss(x, torch.tensor(2)),
    X[0],
)
for _axis in (0, -1, None):
    for _exclusive in (False, True):
        case(
            f"cumsum_{_axis}_{_exclusive}",
            lambda bb, x, a=_axis, e=_exclusive: R.cumsum(x, a, exclusive=e),
            lambda x, a=_axis, e=_exclusive: running_sum(x, a, e),
            X,
            shapes=[ROWS],
        )
case(
    "full",
    lambda bb, v, x: R.multiply(bb.emit(R.full((N, 8), v)), x),
    lambda v, x: v.expand(3, 8) * x,
    np.float32(0.3),
    X,
    shapes=[[], ROWS],
)
case(
    "full_like",
    lambda bb, v, x: R.multiply(bb.emit(R.full_like(x, v)), x),
    lambda v, x: v.expand(3, 8) * x,
    np.float32(0.3),
    X,
    shapes=[[], ROWS],
)
