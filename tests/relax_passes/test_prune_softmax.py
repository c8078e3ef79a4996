"""PruneRedundantAttention around a softmax of its own: maxima subtracted twice, and guards."""

import math

import numpy as np
import pytest
import torch
from pruning import assert_same_values, function, ops, prune, tensor
from relax_interpreter import evaluate
from tvm import relax, tirx
from tvm.relax import op as R

B, S = tirx.Var("b", "int64"), tirx.Var("s", "int64")
NEGATIVE = relax.const(-math.inf, "float32")
ZERO = relax.const(0.0, "float32")


def shifted(axis=-1, keepdims=True, op="softmax", of=None, dtype=None):
    """softmax(x - max(x)); `of` is what the maximum is of, `dtype` that of the softmax."""

    def make(emit, x):
        top = emit(R.max(x if of is None else emit(of(x)), axis=axis, keepdims=keepdims))
        top = top if keepdims else emit(R.expand_dims(top, axis))
        x = emit(R.subtract(x, top))
        x = x if dtype is None else emit(R.astype(x, dtype))
        return getattr(R.nn, op)(x, axis=axis)

    return make


TWICE = {
    "softmax": shifted(),
    "log_softmax": shifted(op="log_softmax"),
    "another axis": shifted(axis=1),
    "without keepdims": shifted(keepdims=False),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", TWICE)
def test_a_maximum_subtracted_twice_is_subtracted_once(name, dtype):
    mod = function(TWICE[name], tensor(B, 4, S, dtype=dtype))
    out, rows = prune(mod, "double-stabilisation")
    assert [row.changed for row in rows] == [True]
    assert ops(out)["subtract"] == 0
    assert_same_values(mod, out, (2, 5), (1, 1), (3, 70), exact=True)


def test_infinite_rows_are_nan_before_and_after():
    mod = function(shifted(), tensor(4, 3))
    out, _ = prune(mod, "double-stabilisation")
    inf, nan = math.inf, math.nan
    x = torch.tensor([[-inf] * 3, [0, inf, 1], [nan, 0, 1], [-inf, 0, 1]])
    for mod_ in (mod, out):
        is_nan = evaluate(mod_, [x])[0].isnan().any(dim=-1)
        assert is_nan.tolist() == [True, True, True, False]


STAYS = {
    "float16": (shifted(), "float16", "its sum of exponentials may need it"),
    "bfloat16": (shifted(), "bfloat16", "its sum of exponentials may need it"),
    "float16, softmax in float32": (shifted(dtype="float32"), "float16", "were not rounded"),
    "of something else": (shifted(of=R.tanh), "float32", "is not the maximum of `a0` along 2"),
}


@pytest.mark.parametrize("name", STAYS)
def test_other_shifts_stay_and_say_why(name):
    make, dtype, reason = STAYS[name]
    mod = function(make, tensor(2, 4, 6, dtype=dtype))
    out, rows = prune(mod, "double-stabilisation")
    assert out.same_as(mod)
    assert [row.changed for row in rows] == [False]
    assert reason in rows[0].reason


def test_a_maximum_along_another_axis_stays():
    def make(emit, x):
        return R.nn.softmax(emit(R.subtract(x, emit(R.max(x, axis=1, keepdims=True)))), axis=2)

    mod = function(make, tensor(2, 4, 6))
    assert prune(mod, "double-stabilisation") == (mod, [])


def causal(emit, offset=0):
    """(S, S), True where j ≤ i + offset."""
    query = emit(R.expand_dims(emit(R.arange(offset, S + offset, 1, "int64")), 1))
    return emit(R.less_equal(emit(R.arange(0, S, 1, "int64")), query))


def any_visible(emit, scores, _weights, _mask):
    hidden = emit(R.equal(scores, NEGATIVE))
    shown = emit(R.astype(emit(R.logical_not(hidden)), "int8"))
    any_shown = emit(R.astype(emit(R.max(shown, axis=-1, keepdims=True)), "bool"))
    return emit(R.logical_not(any_shown))


def all_hidden(emit, scores, _weights, _mask):
    hidden = emit(R.astype(emit(R.equal(scores, NEGATIVE)), "int8"))
    return emit(R.astype(emit(R.min(hidden, axis=-1, keepdims=True)), "bool"))


def none_in_the_mask(emit, _scores, _weights, mask):
    shown = emit(R.max(emit(R.astype(mask, "float32")), axis=-1, keepdims=True))
    return emit(R.logical_not(emit(R.greater(shown, ZERO))))


def is_nan(emit, _scores, weights, _mask):
    return emit(R.isnan(weights))


GUARDS = {f.__name__: f for f in (any_visible, all_hidden, none_in_the_mask, is_nan)}


def guarded(guard, mask=causal, add=False):
    """where(guard, 0, softmax(masked q kᵀ)): what a near miss of attention has."""

    def make(emit, q, k, *given):
        scores = emit(R.multiply(emit(R.matmul(q, k)), relax.const(0.25, "float32")))
        shown = given[0] if given else mask(emit)
        if add:
            scores = emit(R.add(scores, emit(R.where(shown, ZERO, NEGATIVE))))
        else:
            scores = emit(R.where(shown, scores, NEGATIVE))
        weights = emit(R.nn.softmax(scores, axis=-1))
        return R.where(guard(emit, scores, weights, shown), ZERO, weights)

    return make


TYPES = tensor(B, 2, S, 8), tensor(B, 2, 8, S)


ADDED = [name for name in GUARDS if name != "none_in_the_mask"]  # whose mask is no bool


@pytest.mark.parametrize(
    ("name", "add"), [(name, False) for name in GUARDS] + [(name, True) for name in ADDED]
)
def test_guards_of_rows_that_show_a_key_go(name, add):
    mod = function(guarded(GUARDS[name], add=add), *TYPES)
    out, rows = prune(mod, "empty-rows")
    assert [row.changed for row in rows] == [True]
    assert "j ≤ i + (0)" in rows[0].reason
    assert ops(out)["where"] == 1
    assert_same_values(mod, out, (2, 5), (1, 1), exact=True)


@pytest.mark.parametrize("name", GUARDS)
def test_guards_of_rows_that_may_be_empty_stay(name):
    mod = function(guarded(GUARDS[name]), *TYPES, tensor(B, 1, 1, S, dtype="bool"))
    out, rows = prune(mod, "empty-rows")
    assert out.same_as(mod)
    assert [row.changed for row in rows] == [False]
    assert "mask `a2` may hide all keys of a row" in rows[0].reason


def test_guards_of_a_first_row_that_is_empty_stay():
    mod = function(guarded(any_visible, lambda emit: causal(emit, -1)), *TYPES)
    out, rows = prune(mod, "empty-rows")
    assert out.same_as(mod)
    assert [row.changed for row in rows] == [False]


def test_scores_of_unknown_origin_may_be_infinite():
    def make(emit, x):
        weights = emit(R.nn.softmax(x, axis=-1))
        return R.where(any_visible(emit, x, weights, None), ZERO, weights)

    out, rows = prune(function(make, tensor(2, 3)), "empty-rows")
    assert [row.reason for row in rows] == ["the guard `lv6` stays: `a0` may be -inf itself"]
    x = torch.tensor([[-math.inf] * 3, [0.0, 1.0, 2.0]])
    assert evaluate(out, [x])[0][0].tolist() == [0.0] * 3


def _swapped(emit, scores, weights, mask):
    return emit(R.logical_not(any_visible(emit, scores, weights, mask)))


def _any_hidden(emit, scores, _weights, _mask):
    hidden = emit(R.astype(emit(R.equal(scores, NEGATIVE)), "int8"))
    return emit(R.astype(emit(R.max(hidden, axis=-1, keepdims=True)), "bool"))


def _along_queries(emit, scores, _weights, _mask):
    hidden = emit(R.astype(emit(R.equal(scores, NEGATIVE)), "int8"))
    return emit(R.astype(emit(R.min(hidden, axis=-2, keepdims=True)), "bool"))


def _of_zero(emit, scores, _weights, _mask):
    hidden = emit(R.astype(emit(R.equal(scores, ZERO)), "int8"))
    return emit(R.astype(emit(R.min(hidden, axis=-1, keepdims=True)), "bool"))


@pytest.mark.parametrize("guard", [_swapped, _any_hidden, _along_queries, _of_zero])
def test_conditions_that_test_something_else_stay(guard):
    mod = function(guarded(guard), *TYPES)
    assert prune(mod, "empty-rows") == (mod, [])


def test_a_constant_mask_with_an_empty_row_stays():
    mask = np.tril(np.ones((4, 4), bool), -1)
    mod = function(
        guarded(any_visible, lambda _: relax.const(mask)), tensor(1, 4, 8), tensor(1, 8, 4)
    )
    out, rows = prune(mod, "empty-rows")
    assert out.same_as(mod)
    assert [row.changed for row in rows] == [False]
