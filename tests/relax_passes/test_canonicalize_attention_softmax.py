"""Softmax by hand, in half precision, and in backward functions."""

import pytest
from attention_blocks import INF, LOWEST, attention_of, canonical, causal, const, reason_of, row_of
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R


def by_hand(bb, scores):
    powers = bb.emit(O.exp(scores))
    return bb.emit(O.divide(powers, row_of(bb, powers, O.sum)))


def of_masked_scores(weights, k):
    """weights(bb, scores) v, where hidden scores are the lowest number."""
    bb = relax.BlockBuilder()
    x = [relax.Var(n, relax.TensorType((2, 4, 6, 8), "float32")) for n in "qkv"]
    with bb.function("main", x):
        with bb.dataflow():
            scores = bb.emit(O.matmul(x[0], bb.emit(O.permute_dims(x[1], [0, 1, 3, 2]))))
            shown = causal(bb, columns=6, k=k)
            scores = bb.emit(O.where(shown, scores, const(LOWEST)))
            out = bb.emit_output(O.matmul(weights(bb, scores), x[2]))
        bb.emit_func_output(out)
    return bb.get()


def without(bb, scores):
    return scores


def less_one(bb, scores):
    return bb.emit(O.subtract(scores, const(1.0)))


def less_maximum(bb, scores):
    return bb.emit(O.subtract(scores, row_of(bb, scores, O.max)))


@pytest.mark.parametrize("less", [without, less_one, less_maximum])
def test_lowest_numbers_without_a_maximum(less):
    """exp(lowest) is 0: a row of nothing else divides by 0, where the op takes the mean."""

    def weights(bb, scores):
        return by_hand(bb, less(bb, scores))

    assert attention_of(of_masked_scores(weights, k=0))
    empty_row = of_masked_scores(weights, k=-1)
    if less is less_maximum:
        assert attention_of(empty_row)["empty_row"] == "uniform"
    else:
        assert reason_of(empty_row) == "softmax-unstable"


@pytest.mark.parametrize("added", [O.max, O.min])
def test_a_logarithm_takes_back_what_was_subtracted(added):
    """exp(s - (c + log(sum(exp(s - max))))) sums to 1 for c = max alone."""

    def weights(bb, scores):
        highest = row_of(bb, scores, O.max)
        shift = highest if added is O.max else row_of(bb, scores, added)
        powers = bb.emit(O.exp(bb.emit(O.subtract(scores, highest))))
        log = bb.emit(O.log(row_of(bb, powers, O.sum)))
        row = bb.emit(O.add(shift, log))
        return bb.emit(O.exp(bb.emit(O.subtract(scores, row))))

    mod = of_masked_scores(weights, k=0)
    if added is O.max:
        assert attention_of(mod)
    else:
        assert reason_of(mod) == "softmax-form"


def test_softmaxes_that_gradients_read_are_one_row():
    @I.ir_module
    class Mod:
        @R.function
        def main(q: R.Tensor((1, 2, 6, 8), "float32"), k: R.Tensor((1, 2, 6, 8), "float32")):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                first = R.matmul(R.nn.softmax(R.matmul(q, kt), axis=-1), k)
                second = R.matmul(R.nn.softmax(R.matmul(first, kt), axis=-1), k)
                loss = R.sum(second)
                R.output(loss)
            return loss

    after, rows = canonical(relax.transform.Gradient("main")(Mod))
    assert after["main"].script().count("R.sits.attention") == 2
    found = [row for row in rows if row.function == "main_adjoint"]
    assert [row.recognised for row in found] == [False]
    assert found[0].reason.startswith("weights-of-gradients: gradients read the weights of 2")


def test_lowest_number_added_to_float16_scores_does_not_absorb_them():
    """-65504 - 17 is -inf there: no row of nothing else is surely uniform."""
    bb = relax.BlockBuilder()
    x = [relax.Var(n, relax.TensorType((2, 4, 6, 8), "float16")) for n in "qkv"]
    with bb.function("main", x):
        with bb.dataflow():
            scores = bb.emit(O.matmul(x[0], bb.emit(O.permute_dims(x[1], [0, 1, 3, 2]))))
            shown = causal(bb, columns=6, k=-1)
            zero, lowest = const(0.0, "float16"), const(-65504.0, "float16")
            scores = bb.emit(O.add(scores, bb.emit(O.where(shown, zero, lowest))))
            out = bb.emit_output(O.matmul(bb.emit(O.nn.softmax(scores)), x[2]))
        bb.emit_func_output(out)
    found = attention_of(bb.get())
    assert (found["causal"], found["empty_row"], found["scores_dtype"]) == (None, "nan", "float16")
    assert found["bias"].ty.dtype == "float16"


def _cast_after_mask(fill):
    bb = relax.BlockBuilder()
    x = [relax.Var(n, relax.TensorType((2, 4, 6, 8), "float16")) for n in "qkv"]
    with bb.function("main", x):
        with bb.dataflow():
            kt = bb.emit(O.permute_dims(x[1], [0, 1, 3, 2]))
            scores = bb.emit(O.matmul(x[0], kt, out_dtype="float32"))
            scores = bb.emit(O.where(causal(bb, columns=6, k=-1), scores, const(fill)))
            weights = bb.emit(O.nn.softmax(bb.emit(O.astype(scores, "float16"))))
            out = bb.emit_output(O.matmul(weights, x[2]))
        bb.emit_func_output(out)
    return bb.get()


def test_a_narrowing_cast_makes_lowest_numbers_infinite():
    """The first row sees no key: NaN after the cast to float16, not the mean of the values."""
    assert reason_of(_cast_after_mask(LOWEST)) == "cast-after-mask"
    assert attention_of(_cast_after_mask(INF))["empty_row"] == "nan"
