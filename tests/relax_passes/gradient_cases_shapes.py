"""Gradients of ops that move elements or add them up along an axis, and their torch equivalents."""

import torch
from gradient_inputs import ROWS, Cases, M, N, X, Y
from tvm import relax
from tvm.relax import op as R

CASES = Cases()
case = CASES.add

LAST = (1 << 63) - 1


def take(x, indices, axis=None, mode="fast"):
    return R.take(x, relax.const(indices, "int64"), axis, mode)


def running_sum(x, axis, exclusive):
    x = x.flatten() if axis is None else x
    total = x.cumsum(axis or 0)
    return total - x if exclusive else total


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

for _axis in (0, -1, None):
    for _exclusive in (False, True):
        case(
            f"cumsum_{_axis}_{_exclusive}",
            lambda bb, x, a=_axis, e=_exclusive: R.cumsum(x, a, exclusive=e),
            lambda x, a=_axis, e=_exclusive: running_sum(x, a, e),
            X,
            shapes=[ROWS],
        )
