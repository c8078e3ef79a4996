"""`relax.sits.attention` in plain Relax ops: what it means, and what runs where no kernel does."""

from __future__ import annotations

import ml_dtypes
import tvm
from tvm import relax
from tvm.relax import op as R


def lower_plain(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Emit `call` as two matmuls and a softmax; the result is (B, H, Sq, Dv).

    The H / G query heads of one key/value head become rows of one product, so keys and values are
    never repeated. Masked scores are selected, not added: garbage in a masked key stays there.
    The shapes of q, k and v must be known.
    """
    q, k, v = call.args[:3]
    batch, num_heads, num_queries, _ = q.ty.shape
    num_keys, width = k.ty.shape[2], v.ty.shape[3]
    num_kv_heads = k.ty.shape[1]
    grouped = [batch, num_kv_heads, int(num_heads) // int(num_kv_heads) * num_queries]

    scores = _scores(bb, _reshape(bb, q, [*grouped, q.ty.shape[3]]), k, call.attrs)
    scores = _reshape(bb, scores, [batch, num_heads, num_queries, num_keys])
    scores = _mask(bb, _cap(bb, scores, call.attrs["softcap"]), call)
    weights = _softmax(bb, scores, call.attrs)
    weights = _cast(bb, _reshape(bb, weights, [*grouped, num_keys]), v.ty.dtype)
    out = _cast(bb, _matmul(bb, weights, v), v.ty.dtype)
    out = _reshape(bb, out, [batch, num_heads, num_queries, width])
    return _without_keys(bb, out, num_keys, call.attrs["empty_row"])


def _without_keys(
    bb: relax.BlockBuilder, out: relax.Expr, num_keys: tvm.ir.Expr, empty_row: str
) -> relax.Expr:
    """For Sk = 0 the value of an empty row: a reduction over nothing leaves its buffer unset."""
    analyzer = tvm.sym.Analyzer()
    if analyzer.can_prove(num_keys > 0) or analyzer.can_prove_equal(num_keys, out.ty.shape[2]):
        return out
    count = bb.emit(R.arange(num_keys, num_keys + 1, 1, "int64"))
    has_keys = bb.emit(R.greater(count, relax.const(0, "int64")))
    empty = _const(0.0 if empty_row == "zero" else float("nan"), out)
    return bb.emit(R.where(has_keys, out, empty))


def _scores(
    bb: relax.BlockBuilder, q: relax.Expr, k: relax.Expr, attrs: tvm.ir.Attrs
) -> relax.Expr:
    """scale · q kᵀ in `scores_dtype`. Scaling half-precision q would round it a second time."""
    scale, is_wide = attrs["scale"], q.ty.dtype == _accumulator(q.ty.dtype)
    if is_wide:
        q = _scaled(bb, q, scale)
    scores = _matmul(bb, q, bb.emit(R.permute_dims(k, [0, 1, 3, 2])))
    if not is_wide:
        scores = _scaled(bb, scores, scale)
    return _cast(bb, scores, attrs["scores_dtype"])


def _cap(bb: relax.BlockBuilder, scores: relax.Expr, softcap: float) -> relax.Expr:
    if softcap == 0.0:
        return scores
    return _scaled(bb, bb.emit(R.tanh(_scaled(bb, scores, 1.0 / softcap))), softcap)


def _mask(bb: relax.BlockBuilder, scores: relax.Expr, call: relax.Call) -> relax.Expr:
    """Scores plus a float bias, -inf where that is -inf, or where a bool bias, the offset or the
    window hides the key: there the score does not count, be it NaN."""
    for bias in call.args[3:]:
        if bias.ty.dtype == "bool":
            scores = _hide(bb, scores, bias)
        else:
            bias = _cast(bb, bias, scores.ty.dtype)
            is_hidden = bb.emit(R.equal(bias, _const(float("-inf"), bias)))
            scores = bb.emit(R.where(is_hidden, bias, bb.emit(R.add(scores, bias))))
    visible = _causal_and_window(bb, scores, call.attrs)
    return scores if visible is None else _hide(bb, scores, visible)


def _hide(bb: relax.BlockBuilder, scores: relax.Expr, visible: relax.Expr) -> relax.Expr:
    return bb.emit(R.where(visible, scores, _const(float("-inf"), scores)))


def _causal_and_window(
    bb: relax.BlockBuilder, scores: relax.Expr, attrs: tvm.ir.Attrs
) -> relax.Expr | None:
    """(Sq, Sk) bool, or None where every query provably sees every key."""
    num_queries, num_keys = list(scores.ty.shape)[2:]
    causal, window = attrs["causal"], attrs["window"]
    offset = num_keys - num_queries if causal == "bottom_right" else (causal or 0)
    last, prove = offset + num_queries - 1, tvm.sym.Analyzer().can_prove
    is_causal = causal is not None and not prove(num_keys - 1 <= offset)
    is_windowed = window > 0 and not prove(last < window)
    if not (is_causal or is_windowed):
        return None
    query = bb.emit(R.arange(offset, offset + num_queries, 1, "int64"))
    query = bb.emit(R.expand_dims(query, 1))
    key = bb.emit(R.arange(0, num_keys, 1, "int64"))
    masks = []
    if is_causal:
        masks.append(bb.emit(R.less_equal(key, query)))
    if is_windowed:
        oldest = bb.emit(R.subtract(query, relax.const(window, "int64")))
        masks.append(bb.emit(R.greater(key, oldest)))
    return masks[0] if len(masks) == 1 else bb.emit(R.logical_and(*masks))


def _softmax(bb: relax.BlockBuilder, scores: relax.Expr, attrs: tvm.ir.Attrs) -> relax.Expr:
    """Rows of nothing but -inf are NaN after softmax, unless `empty_row` says otherwise."""
    empty_row, scores = attrs["empty_row"], _cast(bb, scores, attrs["softmax_dtype"])
    hidden = _const(float("-inf"), scores)
    if empty_row == "uniform":
        is_hidden = bb.emit(R.equal(scores, hidden))
        lowest = _const(float(ml_dtypes.finfo(str(scores.ty.dtype)).min), scores)
        scores = bb.emit(R.where(is_hidden, lowest, scores))
    weights = bb.emit(R.nn.softmax(scores, axis=-1))
    if empty_row != "zero":
        return weights
    visible = _cast(bb, bb.emit(R.not_equal(scores, hidden)), scores.ty.dtype)
    any_visible = bb.emit(R.max(visible, axis=-1, keepdims=True))
    any_visible = bb.emit(R.greater(any_visible, _const(0.0, scores)))
    return bb.emit(R.where(any_visible, weights, _const(0.0, scores)))


def _matmul(bb: relax.BlockBuilder, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    wide = _accumulator(a.ty.dtype)
    return bb.emit(R.matmul(a, b, out_dtype=None if a.ty.dtype == wide else wide))


def _scaled(bb: relax.BlockBuilder, x: relax.Expr, factor: float) -> relax.Expr:
    return x if factor == 1.0 else bb.emit(R.multiply(x, _const(factor, x)))


def _cast(bb: relax.BlockBuilder, x: relax.Expr, dtype: object) -> relax.Expr:
    return x if x.ty.dtype == dtype else bb.emit(R.astype(x, str(dtype)))


def _reshape(bb: relax.BlockBuilder, x: relax.Expr, shape: list) -> relax.Expr:
    is_same = len(shape) == len(x.ty.shape) and all(
        tvm.sym.Analyzer().can_prove_equal(a, b) for a, b in zip(x.ty.shape, shape, strict=True)
    )
    return x if is_same else bb.emit(R.reshape(x, shape))


def _const(value: float, like: relax.Expr) -> relax.Expr:
    return relax.const(value, str(like.ty.dtype))


def _accumulator(dtype: object) -> str:
    return "float64" if dtype == "float64" else "float32"
