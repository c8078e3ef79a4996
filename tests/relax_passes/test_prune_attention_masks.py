"""PruneRedundantAttention at R.sits.attention: masks that hide nothing, keys that all hide."""

import numpy as np
import pytest
import torch
from pruning import (
    arrays,
    assert_same_values,
    attend,
    call,
    function,
    prune,
    qkv,
    rules_of,
    symbols,
)
from relax_interpreter import evaluate
from tvm import tirx
from tvm.relax import op as R

from relax_passes.op import attention

S = tirx.Var("s", "int64")


NOTHING_HIDDEN = {
    "bias True": (qkv(5, 7), {"bias": np.ones((5, 7), bool)}),
    "bias 0": (qkv(5, 7), {"bias": np.zeros((4, 1, 7), "float32")}),
    "offset": (qkv(5, 7), {"causal": 6}),
    "last query alone": (qkv(1, 7), {"causal": "bottom_right"}),
    "window": (qkv(5, 5), {"causal": 0, "window": 5}),
    "window, no offset": (qkv(5, 7), {"window": 5}),
    "one of each": (qkv(1, 1), {"causal": 0, "window": 1, "bias": np.zeros((1, 1), "float32")}),
}


@pytest.mark.parametrize("name", NOTHING_HIDDEN)
def test_masks_that_hide_nothing_go(name):
    types, attributes = NOTHING_HIDDEN[name]
    mod = attend(*types, **attributes)
    out, rows = prune(mod, "neutral-operations")
    found = call(out)
    assert rows
    assert all(row.changed for row in rows)
    assert (len(found.args), found.attrs["window"]) == (3, 0)
    assert (found.attrs["causal"] is None) == (name != "window")
    assert_same_values(mod, out)


SOMETHING_HIDDEN = {
    "one False": (qkv(5, 7), {"bias": np.arange(35).reshape(5, 7) != 3}),
    "offset too small by one": (qkv(5, 7), {"causal": 5}),
    "last two queries": (qkv(2, 7), {"causal": "bottom_right"}),
    "window too small by one": (qkv(5, 5), {"causal": 0, "window": 4}),
    "window after an offset": (qkv(1, 7), {"causal": "bottom_right", "window": 6}),
    "offset moves the window": (qkv(2, 4), {"causal": 4, "window": 5}),
    "dynamic": (qkv(*symbols("st")), {"causal": "bottom_right"}),
}


@pytest.mark.parametrize("name", SOMETHING_HIDDEN)
def test_masks_that_hide_something_stay(name):
    types, attributes = SOMETHING_HIDDEN[name]
    mod = attend(*types, **attributes)
    assert prune(mod, "neutral-operations") == (mod, [])


def _shown(emit, s, shift):
    """Visible where j < i + shift."""
    query = emit(R.expand_dims(emit(R.arange(shift, s + shift, 1, "int64")), 1))
    return emit(R.less(emit(R.arange(0, s, 1, "int64")), query))


def test_a_mask_proved_to_be_true_goes():
    (s,) = symbols("s")
    mod = function(lambda emit, q, k, v: attention(q, k, v, _shown(emit, s, s)), *qkv(s, s))
    out, rows = prune(mod, "neutral-operations")
    assert len(call(out).args) == 3
    assert "is True everywhere" in rows[0].reason
    assert_same_values(mod, out, (5,), (1,))


def test_a_mask_that_hides_the_last_key_from_the_first_query_stays():
    (s,) = symbols("s")
    mod = function(lambda emit, q, k, v: attention(q, k, v, _shown(emit, s, s - 1)), *qkv(s, s))
    assert prune(mod, "neutral-operations") == (mod, [])


@pytest.mark.parametrize(("reach", "left"), [(S, 3), (S - 1, 4)])
def test_a_mask_from_below_goes_where_it_hides_nothing(reach, left):
    """Visible where j > i - reach: the last query is S - 1."""

    def make(emit, q, k, v):
        query = emit(R.expand_dims(emit(R.arange(0 - reach, S - reach, 1, "int64")), 1))
        return attention(q, k, v, emit(R.greater(emit(R.arange(0, S, 1, "int64")), query)))

    mod = function(make, *qkv(S, S))
    out, _ = prune(mod, "neutral-operations")
    assert len(call(out).args) == left
    assert_same_values(mod, out, (5,), (1,))


SHOWN = np.zeros((3, 9), bool)
SHOWN[0, 2:7] = SHOWN[1, 4:6] = SHOWN[2, 3] = True
HIDDEN = {
    "behind the last query": (qkv(4, 9), {"causal": 0}, 4, {"causal": 0}),
    "behind an offset": (qkv(3, 9), {"causal": 2, "empty_row": "zero"}, 5, {"causal": 2}),
    "negative offset": (qkv(5, 9), {"causal": -2, "empty_row": "zero"}, 3, {"causal": -2}),
    "before the window": (
        qkv(2, 9), {"causal": "bottom_right", "window": 3}, 4, {"causal": "bottom_right"},
    ),
    "on both sides": (qkv(3, 9), {"causal": 4, "window": 2}, 4, {"causal": 1, "window": 2}),
    "constant mask": (qkv(3, 9), {"bias": SHOWN}, 5, {"causal": None}),
    "constant mask and offset": (
        qkv(3, 9), {"bias": SHOWN, "causal": "bottom_right"}, 5, {"causal": 4},
    ),
    "constant mask and window": (qkv(3, 9), {"bias": SHOWN, "window": 2}, 5, {"window": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_keys_hidden_from_all_queries_go(name):
    types, attributes, left, after = HIDDEN[name]
    mod = attend(*types, **attributes)
    out, rows = prune(mod, "hidden-keys")
    found = call(out)
    assert rules_of(rows) == [("hidden-keys", True)]
    assert [int(x.ty.shape[2]) for x in found.args[1:3]] == [left] * 2
    assert {key: found.attrs[key] for key in after} == after
    assert_same_values(mod, out)


@pytest.mark.parametrize("name", ["behind the last query", "on both sides", "constant mask"])
def test_hidden_keys_may_hold_anything(name):
    types, attributes, *_ = HIDDEN[name]
    mod = attend(*types, **attributes)
    out, _ = prune(mod)
    (slice_,) = {tuple(map(int, (b[0], e[0]))) for b, e in _ranges(out)}
    inputs = arrays(mod, ())
    want = evaluate(mod, inputs)[0]
    for x in inputs[1:]:
        x[:, :, : slice_[0]] = x[:, :, slice_[1] :] = float("nan")
    torch.testing.assert_close(evaluate(out, inputs)[0], want, atol=1e-6, rtol=1e-6)


def _ranges(mod):
    values = [b.value for b in mod["main"].body.blocks[0].bindings]
    return [v.args[2:4] for v in values if v.op.name == "relax.strided_slice"]


def test_hidden_keys_of_symbolic_lengths():
    (s,) = symbols("s")
    mod = attend(*qkv(s, s + 3), causal=0)
    mod["main"] = mod["main"].with_attr("tir_var_lower_bound", {"s": 1})
    out, rows = prune(mod, "hidden-keys")
    assert rows[0].reason == "only 0 ≤ j < s of s + 3 keys can be seen: causal offset 0"
    assert_same_values(mod, out, (4,), (1,))


KEPT = {
    "all visible": (qkv(9, 9), {"causal": 0}, []),
    "lengths unknown": (qkv(*symbols("st")), {"causal": 0}, []),
    "hidden in the middle": (qkv(2, 3), {"bias": np.array([True, False, True])}, []),
    "mask of all keys alike": (qkv(2, 3), {"bias": np.zeros((2, 1), bool)}, []),
    "mean of all keys": (
        qkv(5, 9), {"causal": -2, "empty_row": "uniform"},
        ["not removed: only 0 ≤ j < 3 of 9 keys can be seen: causal offset -2; but a row that "
         "sees none is the mean of all"],
    ),
    "none is left": (
        qkv(2, 9), {"causal": -2},
        ["not removed: only 0 ≤ j < 0 of 9 keys can be seen: causal offset -2; at least one has "
         "to stay"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_hidden_keys_that_stay(name):
    types, attributes, reasons = KEPT[name]
    mod = attend(*types, **attributes)
    out, rows = prune(mod, "hidden-keys")
    assert out.same_as(mod)
    assert [row.reason for row in rows] == reasons
