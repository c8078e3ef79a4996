"""Masks as causal offset, window and bias, and what a row that shows no key gives."""

import numpy as np
import pytest
import torch
import tvm
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
from relax_interpreter import evaluate
from small_modules import one_function
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes.op import attention


@pytest.mark.parametrize(
    ("fill", "k", "empty_row"),
    [(INF, 0, "nan"), (INF, -1, "nan"), (LOWEST, 0, "nan"), (LOWEST, -1, "uniform")],
)
def test_causal_masks_keep_the_meaning_of_empty_rows(fill, k, empty_row):
    """With k = -1 the first row is empty. Where no row is, the lowest number is as good as -inf."""
    found = attention_of(block(masked(fill, k)))
    assert (found["causal"], found["empty_row"], found["bias"]) == (k, empty_row, None)


def test_offset_is_bottom_right_for_symbolic_lengths():
    s, t = tvm.tirx.Var("s", "int64"), tvm.tirx.Var("t", "int64")

    def steps(bb, scores):
        row = bb.emit(O.arange(t - s, t, 1, "int64"))
        row = bb.emit(O.expand_dims(row, 1))
        column = bb.emit(O.arange(0, t, 1, "int64"))
        return bb.emit(O.where(bb.emit(O.less_equal(column, row)), scores, const(INF)))

    found = attention_of(block(steps, q=(2, 4, s, 8), k=(2, 4, t, 8), v=(2, 4, t, 8)))
    assert (found["causal"], found["bias"]) == ("bottom_right", None)


def test_a_run_time_mask_is_a_bias():
    """Nothing is proved of the contents: -inf by where() is a bool bias, an added float stays."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
            padding: R.Tensor((2, 1, 1, 7), "bool"),
            added: R.Tensor((7,), "float32"),
        ):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                scores = R.matmul(q, kt)
                biased = R.add(scores, added)
                visible = R.where(padding, biased, R.const(float("-inf"), "float32"))
                weights = R.nn.softmax(visible, axis=-1)
                y = R.matmul(weights, v)
                R.output(y)
            return y

    found = attention_of(Mod)
    assert str(found["bias"].ty) == 'R.Tensor((2, 1, 1, 7), dtype="float32")'
    assert found["empty_row"] == "nan"


def test_masks_of_both_kinds_are_one_float_bias():
    """-inf and the lowest number together have no word in the op: the bias holds both."""

    def steps(bb, scores):
        return masked(LOWEST, k=-1)(bb, masked(INF, k=-2)(bb, scores))

    found = attention_of(block(steps))
    assert (found["causal"], str(found["bias"].ty.dtype)) == (None, "float32")


def test_masks_of_both_kinds_that_leave_one_are_one():
    """The lowest number overwrites every -inf."""

    def steps(bb, scores):
        return masked(LOWEST, k=-2)(bb, masked(INF, k=-1)(bb, scores))

    found = attention_of(block(steps))
    assert (found["causal"], found["empty_row"], found["bias"]) == (-2, "uniform", None)


@pytest.mark.parametrize(("inner", "outer"), [(LOWEST, -1e30), (-1e30, LOWEST)])
def test_masks_of_different_lowest_numbers_are_one_float_bias(inner, outer):
    """Row 0 shows no key: only those with the higher number have weight."""

    def steps(bb, scores):
        return masked(outer, k=-2)(bb, masked(inner, k=-1)(bb, scores))

    before = block(steps)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, n, 8) for n in (6, 7, 7)]
    after, _ = canonical(before)
    torch.testing.assert_close(evaluate(after, inputs), evaluate(before, inputs))


def test_what_where_hides_stays_out_beside_a_float_bias():
    """NaN in a hidden key: where() does not read it, nor does the bias that both masks become."""
    shown = np.random.default_rng(0).random((6, 7)) < 0.5
    shown[:, 0], shown[:, 6] = True, False

    def steps(bb, scores):
        biased = bb.emit(O.add(scores, const(np.full((6, 7), 0.5), "float32")))
        return bb.emit(O.where(const(shown, "bool"), biased, const(INF)))

    before = block(steps)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, n, 8) for n in (6, 7, 7)]
    inputs[1][:, :, 6] = torch.nan
    (want,) = evaluate(before, inputs)
    assert attention_of(before)["bias"].ty.dtype == "float32"
    assert torch.isfinite(want).all()
    torch.testing.assert_close(evaluate(canonical(before)[0], inputs), [want])


def test_tanh_of_scores_less_their_maximum_is_no_softcap():
    def steps(bb, scores):
        highest = bb.emit(O.max(scores, axis=-1, keepdims=True))
        return bb.emit(O.tanh(bb.emit(O.subtract(scores, highest))))

    assert reason_of(block(steps)) == "tanh-after-mask"


def test_a_bool_added_as_a_number_is_a_bias():
    def steps(bb, scores):
        return bb.emit(O.add(scores, bb.emit(O.astype(causal(bb), "float32"))))

    assert str(attention_of(block(steps))["bias"].ty.dtype) == "float32"


def test_a_mask_that_hides_nothing_is_none():
    assert attention_of(block(masked(INF, k=6)))["causal"] is None


# Empty rows.


def guarded(bb, weights):
    nan = bb.emit(O.isnan(weights))
    return bb.emit(O.where(nan, const(0.0), weights))


@pytest.mark.parametrize(
    ("fill", "empty_row"), [(INF, "zero"), (LOWEST, "uniform")], ids=["infinite", "lowest"]
)
def test_guard_against_nan(fill, empty_row):
    """A row of the lowest number is not NaN: the guard does nothing there."""
    assert attention_of(block(masked(fill, k=-1), after=guarded))["empty_row"] == empty_row


def test_safe_softmax():
    """As PyTorch decomposes scaled_dot_product_attention."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
            m: R.Tensor((6, 7), "bool"),
        ):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                scores = R.matmul(q, kt)
                x = R.where(m, scores, R.const(float("-inf"), "float32"))
                weights = R.nn.softmax(x, axis=-1)
                hidden = R.equal(x, R.const(float("-inf"), "float32"))
                shown = R.astype(R.logical_not(hidden), "int8")
                any_shown = R.max(shown, axis=[-1], keepdims=True)
                empty = R.logical_not(R.astype(any_shown, "bool"))
                zeros = R.full_like(weights, R.const(0.0, "float32"))
                safe = R.where(empty, zeros, weights)
                y = R.matmul(safe, v)
                R.output(y)
            return y

    found = attention_of(Mod)
    assert (found["empty_row"], str(found["bias"].ty.dtype)) == ("zero", "bool")


def test_a_guard_with_another_meaning_is_refused():
    def after(bb, weights):
        low = bb.emit(O.less(weights, const(0.01)))
        return bb.emit(O.where(low, const(0.0), weights))

    assert reason_of(block(lambda bb, s: s, after=after)) == "weights-used-elsewhere"


@pytest.mark.parametrize(("fill", "empty_row"), [(INF, "zero"), (LOWEST, "uniform")])
def test_the_float_bias_of_an_op_is_read(fill, empty_row):
    """Row 0 shows no key: -inf makes it 0, as the op says; the lowest number makes it uniform."""

    def body(bb, q, k, v):
        mask = bb.emit(O.where(causal(bb, k=-1), const(0.0), const(fill)))
        return attention(q, k, v, mask, scale=1.0, empty_row="zero")

    shapes = (2, 4, 6, 8), (2, 4, 7, 8), (2, 4, 7, 8)
    found = attention_of(one_function(body, *(relax.TensorType(s, "float32") for s in shapes)))
    assert (found["causal"], found["empty_row"], found["bias"]) == (-1, empty_row, None)
