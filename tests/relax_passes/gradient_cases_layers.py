"""Gradients of products, norms, attention and losses, and their torch equivalents."""

import torch
from gradient_inputs import POSITIVE, ROWS, Cases, M, N, W, X, Y, chain, draw
from tvm import relax
from tvm.relax import op as R

from relax_passes.op import attention

F = torch.nn.functional
CASES = Cases()
case = CASES.add

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
