"""Graphs that are almost attention, with the reason in the report, and graphs that are not."""

import numpy as np
from attention_blocks import causal, const, row_of
from small_modules import one_function
from tvm import relax, tirx
from tvm.relax import op as O

SHAPES = (2, 4, 6, 8), (2, 4, 7, 8), (2, 4, 7, 8)


def written(make, shapes=SHAPES):
    """`make(bb, scores, v)` of scores q kᵀ."""

    def body(bb, q, k, v):
        kt = bb.emit(O.permute_dims(k, [0, 1, 3, 2]), "kt")
        return make(bb, bb.emit(O.matmul(q, kt), "scores"), v)

    return one_function(body, *(relax.TensorType(shape, "float32") for shape in shapes))


def weights_through(make):
    """softmax(q kᵀ), then `make(bb, weights)`, then the values."""

    def whole(bb, scores, v):
        weights = bb.emit(O.nn.softmax(scores, axis=-1), "weights")
        return O.matmul(make(bb, weights), v)

    return written(whole)


def by_hand(make):
    """`make(bb, powers)` times the values, of powers exp(q kᵀ)."""

    def whole(bb, scores, v):
        return O.matmul(make(bb, bb.emit(O.exp(scores), "powers")), v)

    return written(whole)


def concatenated(bb, weights):
    return bb.emit(O.concat([weights, weights], axis=2), "both")


def one_part(bb, weights):
    parts = bb.emit(O.split(weights, 2, axis=2), "parts")
    return bb.emit(relax.TupleGetItem(parts, 0))


def dropped_out(bb, weights):
    pair = bb.emit(O.nn.dropout(weights, 0.1), "dropped")
    return bb.emit(relax.TupleGetItem(pair, 0))


def multiplied(bb, weights):
    gain = relax.const([[[1.0]], [[2.0]], [[0.5]], [[0.1]]], "float32")
    return bb.emit(O.multiply(weights, gain), "gained")


def spread(bb, weights):
    """Each row for itself, by a factor of another axis."""
    gain = relax.const([[[[[0.5]]]], [[[[1.0]]]]], "float32")
    return bb.emit(O.sum(bb.emit(O.multiply(weights, gain), "gained"), axis=0))


def packed(bb, weights):
    pair = bb.emit(relax.Tuple([weights, weights]), "pair")
    return bb.emit(relax.TupleGetItem(pair, 0))


def cast_by_match(bb, x):
    n = tirx.Var("n", "int64")
    return bb.match_cast(x, relax.TensorType((2, 4, 6, n), "float32"), "matched")


def matched_scores(bb, scores, v):
    weights = bb.emit(O.nn.softmax(cast_by_match(bb, scores), axis=-1))
    return O.matmul(weights, v)


def broadcast_scores(bb, scores, v):
    mask = relax.const(np.zeros((3, 1, 1, 6, 7)), "float32")
    weights = bb.emit(O.nn.softmax(bb.emit(O.add(scores, mask), "masked"), axis=-1))
    return O.matmul(weights, v)


def multiply_and_sum(bb, scores, v):
    weights = bb.emit(O.nn.softmax(scores, axis=-1))
    column = bb.emit(O.expand_dims(weights, -1))
    terms = bb.emit(O.multiply(column, bb.emit(O.expand_dims(v, 2))), "terms")
    return O.sum(terms, axis=3)


def over_more_than_the_sum(bb, powers):
    total = bb.emit(O.add(row_of(bb, powers, O.sum), const(1e-6)), "more")
    return bb.emit(O.divide(powers, total))


def masked_powers(bb, powers):
    shown = bb.emit(O.astype(causal(bb), "float32"))
    powers = bb.emit(O.multiply(powers, shown), "hidden")
    return bb.emit(O.divide(powers, row_of(bb, powers, O.sum)))


def of_another_sum(bb, powers):
    total = bb.emit(O.sum(powers, axis=[2, 3], keepdims=True))
    return bb.emit(O.divide(powers, total), "weights")


def times_more(bb, powers):
    total = bb.emit(O.add(row_of(bb, powers, O.sum), const(1e-6)), "more")
    return bb.emit(O.multiply(powers, bb.emit(O.divide(const(1.0), total))))


def not_divided(bb, powers):
    return powers


def never_multiplied(bb, scores, v):
    return bb.emit(O.nn.softmax(scores, axis=-1), "weights")


def of_other_lengths():
    t, u = (tirx.Var(name, "int64") for name in "tu")

    def whole(bb, scores, v):
        return bb.emit(O.matmul(bb.emit(O.nn.softmax(scores, axis=-1)), v), "y")

    return written(whole, ((2, 4, 6, 8), (2, 4, t, 8), (2, 4, u, 8)))


NEAR_MISSES = {
    "weights joined": (
        weights_through(concatenated),
        "weights-changed: R.concat drops or repeats weights, at `both`",
    ),
    "weights split": (
        weights_through(one_part),
        "weights-changed: weights go through R.split, at `parts`",
    ),
    "dropout": (
        weights_through(dropped_out),
        "weights-changed: weights go through R.nn.dropout, at `dropped`",
    ),
    "a gain of each head": (
        weights_through(multiplied),
        "weights-changed: weights go through R.multiply, at `gained`",
    ),
    "a gain of another axis": (
        weights_through(spread),
        "weights-changed: weights go through R.multiply, at `gained`",
    ),
    "weights in a tuple": (
        weights_through(packed),
        "weights-changed: weights go through a tuple, at `pair`",
    ),
    "weights matched": (
        weights_through(cast_by_match),
        "weights-changed: weights go through R.match_cast, at `matched`",
    ),
    "scores matched": (
        written(matched_scores),
        "no-product: scores come from R.match_cast, at `matched`",
    ),
    "scores broadcast": (
        written(broadcast_scores),
        "scores-broadcast: scores [2, 4, 6, 7] are broadcast to [3, 2, 4, 6, 7], at `masked`",
    ),
    "values multiplied and summed": (
        written(multiply_and_sum),
        "weights-changed: weights go through R.multiply, at `terms`",
    ),
    "sum and a little more": (
        by_hand(over_more_than_the_sum),
        "softmax-form: exponentials of scores, or their sum, go through R.add, at `more`",
    ),
    "times 1 / (sum and a little more)": (
        by_hand(times_more),
        "softmax-form: exponentials of scores, or their sum, go through R.add, at `more`",
    ),
    "exponentials masked": (
        by_hand(masked_powers),
        "softmax-form: exponentials of scores, or their sum, go through R.multiply, at `hidden`",
    ),
    "no sum": (
        by_hand(not_divided),
        "softmax-form: exponentials of scores are not divided by their sum, at `powers`",
    ),
    "a sum over two axes": (
        by_hand(of_another_sum),
        "softmax-sum: exponentials are divided by a sum that is not proved to be theirs over one "
        "axis, at `weights`",
    ),
    "weights returned": (
        written(never_multiplied),
        "no-value-product: weights are returned, not multiplied, at `weights`",
    ),
    "as many values as keys?": (
        of_other_lengths(),
        "lengths: there are t keys and u values, at `y`",
    ),
}
