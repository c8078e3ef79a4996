"""Factors, near misses and their reasons, what is returned, and what is one op already."""

import math

import pytest
from attention_blocks import (
    INF,
    LOWEST,
    attention_of,
    block,
    canonical,
    causal,
    const,
    masked,
    reason_of,
)
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R


@pytest.mark.parametrize(
    ("steps", "scale", "softcap"),
    [
        (lambda bb, s: s, 1.0, 0.0),
        (lambda bb, s: bb.emit(O.multiply(s, const(0.3))), 0.3, 0.0),
        (lambda bb, s: bb.emit(O.multiply(const(0.3), s)), 0.3, 0.0),
        (lambda bb, s: bb.emit(O.divide(s, const(math.sqrt(8)))), 8**-0.5, 0.0),
        (lambda bb, s: bb.emit(O.divide(s, const(8.1))), 1 / 8.1, 0.0),
        (lambda bb, s: bb.emit(O.divide(s, bb.emit(O.sqrt(const(8.0))))), 8**-0.5, 0.0),
        (lambda bb, s: bb.emit(O.multiply(bb.emit(O.multiply(s, const(3.0))), const(2.0))), 6, 0),
        (
            lambda bb, s: bb.emit(
                O.multiply(bb.emit(O.tanh(bb.emit(O.divide(s, const(5.0))))), const(5.0))
            ),
            1.0,
            5.0,
        ),
        (lambda bb, s: bb.emit(O.multiply(bb.emit(O.tanh(s)), const(4.0))), 4.0, 4.0),
    ],
)
def test_factors_and_softcap(steps, scale, softcap):
    found = attention_of(block(steps))
    assert found["scale"] == pytest.approx(scale, rel=1e-6)
    assert (found["softcap"], found["causal"], found["bias"]) == (softcap, None, None)


# Near misses.


def multiplied_mask(bb, scores):
    return bb.emit(O.multiply(scores, bb.emit(O.astype(causal(bb), "float32"))))


def scaled_after_mask(bb, scores):
    return bb.emit(O.multiply(masked(LOWEST)(bb, scores), const(0.5)))


def negated_after_mask(bb, scores):
    return bb.emit(O.negative(masked(INF)(bb, scores)))


def scaled_after_bias(bb, scores):
    bias = bb.emit(O.where(causal(bb), const(0.0), const(INF)))
    return bb.emit(O.multiply(bb.emit(O.add(scores, bias)), const(0.5)))


def tanh_after_mask(bb, scores):
    return bb.emit(O.tanh(masked(LOWEST)(bb, scores)))


def own_maximum_added(bb, scores):
    return bb.emit(O.add(scores, bb.emit(O.max(scores, axis=-1, keepdims=True))))


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        (multiplied_mask, "scores-multiplied"),
        (scaled_after_mask, "scale-after-mask"),
        (negated_after_mask, "scale-after-mask"),
        (scaled_after_bias, "scale-after-mask"),
        (tanh_after_mask, "tanh-after-mask"),
        (masked(-1e4), "fill-not-lowest"),
        (own_maximum_added, "mask-of-scores"),
        (lambda bb, s: bb.emit(O.sigmoid(s)), "no-product"),
        (lambda bb, s: bb.emit(O.multiply(s, const(0.0))), "scale-not-finite"),
    ],
)
def test_says_why_not(steps, code):
    assert reason_of(block(steps)) == code


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_over_another_axis(axis):
    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((4, 4, 2, 8), "float32"),
            k: R.Tensor((4, 4, 3, 8), "float32"),
            v: R.Tensor((4, 4, 3, 8), "float32"),
        ):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                scores = R.matmul(q, kt)
                weights = R.nn.softmax(scores, axis=axis)
                y = R.matmul(weights, v)
                R.output(y)
            return y

    assert reason_of(Mod) == "softmax-axis"


def test_factor_after_an_infinite_mask_is_scale():
    def steps(bb, scores):
        return bb.emit(O.divide(masked(INF)(bb, scores), const(2.0)))

    found = attention_of(block(steps))
    assert (found["scale"], found["causal"], found["bias"]) == (0.5, 0, None)


def test_mask_added_in_half_precision_under_a_wide_softmax():
    """In a row of nothing but hidden keys -65504 - 16 is -inf in float16, and not in float32."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float16"),
            k: R.Tensor((2, 4, 7, 8), "float16"),
            v: R.Tensor((2, 4, 7, 8), "float16"),
            m: R.Tensor((6, 7), "float16"),
        ):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                biased = R.add(R.matmul(q, kt), m)
                wide = R.astype(biased, "float32")
                weights = R.astype(R.nn.softmax(wide, axis=-1), "float16")
                y = R.matmul(weights, v)
                R.output(y)
            return y

    found = attention_of(Mod)
    assert (found["scores_dtype"], found["softmax_dtype"]) == ("float16", "float32")
    assert found["bias"].ty.dtype == "float16"


def test_a_classifier_is_no_near_miss():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((2, 8), "float32"), w: R.Tensor((8, 3), "float32")):
            with R.dataflow():
                y = R.nn.softmax(R.matmul(x, w), axis=-1)
                R.output(y)
            return y

    assert canonical(Mod)[1] == []


# What is returned, and what is one op already.


def test_returned_weights_keep_their_chain():
    """The product is fused, the weights are computed as before; the report says that it costs."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
        ):
            with R.dataflow():
                scores = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
                weights = R.nn.softmax(scores, axis=-1)
                y = R.matmul(weights, v)
                R.output(weights, y)
            return (y, weights)

    after, (row,) = canonical(Mod)
    text = after.script()
    assert text.count("R.sits.attention") == text.count("R.nn.softmax") == 1
    assert "twice" in row.reason


def test_weights_of_two_products_are_left_alone():
    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
        ):
            with R.dataflow():
                scores = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
                weights = R.nn.softmax(scores, axis=-1)
                y = R.matmul(weights, v)
                z = R.matmul(weights, k)
                R.output(y, z)
            return (y, z)

    assert reason_of(Mod) == "weights-used-elsewhere"


def test_an_op_sheds_repeated_heads_and_a_known_mask():
    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 2, 7, 8), "float32"),
            v: R.Tensor((2, 2, 7, 8), "float32"),
        ):
            with R.dataflow():
                mask = R.tril(R.ones(R.shape([6, 7]), "bool"), 1)
                keys = R.repeat(k, repeats=2, axis=1)
                values = R.repeat(v, repeats=2, axis=1)
                y = R.sits.attention(q, keys, values, mask, scale=0.5, empty_row="zero")
                R.output(y)
            return y

    found = attention_of(Mod)
    assert [arg.name for arg in found["args"]] == ["q", "k", "v"]
    assert (found["causal"], found["empty_row"]) == (1, "zero")


def test_names_the_binding():
    _, (row,) = canonical(block(multiplied_mask))
    assert row.reason.endswith("a factor per head, at `lv5`")
