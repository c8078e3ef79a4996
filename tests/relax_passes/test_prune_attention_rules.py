"""PruneRedundantAttention at calls of R.sits.attention: heads, masks, hidden keys, empty rows."""

import numpy as np
import pytest
import torch
from pruning import arrays, assert_same_values, call, function, ops, prune, tensor
from relax_interpreter import evaluate
from tvm import relax, tirx
from tvm.relax import op as R

from relax_passes.op import attention

S = tirx.Var("s", "int64")


def attend(*types, bias=None, **attributes):
    """main(q, k, v[, mask]) = attention(…); a `bias` is a constant."""

    def make(emit, q, k, v, *mask):
        given = mask[0] if mask else bias if bias is None else relax.const(bias)
        return attention(q, k, v, given, **attributes)

    return function(make, *types)


def qkv(queries, keys, heads=4, kv_heads=2, batch=1, width=8, dtype="float32"):
    return (
        tensor(batch, heads, queries, width, dtype=dtype),
        tensor(batch, kv_heads, keys, width, dtype=dtype),
        tensor(batch, kv_heads, keys, width, dtype=dtype),
    )


def symbols(names):
    return (tirx.Var(name, "int64") for name in names)


def _expand(emit, x):
    batch, heads, keys, width = x.ty.shape
    x = emit(R.expand_dims(x, 2))
    x = emit(R.broadcast_to(x, (batch, heads, 2, keys, width)))
    return emit(R.reshape(x, (batch, 2 * heads, keys, width)))


def _repeat(emit, x):
    return emit(R.repeat(x, 2, axis=1))


def _turned(emit, x):
    """Repeated as (B, Sk, G, D), as models with heads last do."""
    x = emit(R.permute_dims(x, [0, 2, 1, 3]))
    x = emit(R.repeat(x, 2, axis=2))
    return emit(R.permute_dims(x, [0, 2, 1, 3]))


@pytest.mark.parametrize("repeat", [_expand, _repeat, _turned])
@pytest.mark.parametrize("dynamic", [True, False])
def test_repeated_heads_are_read_once(repeat, dynamic):
    b, s = symbols("bs") if dynamic else (2, 5)
    mod = function(
        lambda emit, q, k, v: attention(q, repeat(emit, k), repeat(emit, v), causal=0),
        *qkv(s, s, heads=8, kv_heads=2, batch=b),
    )
    out, rows = prune(mod, "repeated-heads", "views")
    assert [row.rule for row in rows if row.changed][-1] == "repeated-heads"
    assert "head h // 2 of" in rows[-1].reason
    assert all(x.same_as(y) for x, y in zip(call(out).args, out["main"].params, strict=True))
    assert_same_values(mod, out, *([(2, 5), (1, 1)] if dynamic else []))


def test_repeated_heads_of_k_alone_stay():
    mod = function(
        lambda emit, q, k, v: attention(q, _repeat(emit, k), v),
        tensor(1, 8, 5, 8),
        tensor(1, 2, 5, 8),
        tensor(1, 4, 5, 8),
    )
    out, rows = prune(mod)
    assert out.same_as(mod)
    assert [row.reason for row in rows] == ["heads are repeated differently: k by [2], v by 1"]


def test_tiled_heads_stay():
    """Query head h would read head h mod 2."""
    mod = function(
        lambda emit, q, k, v: attention(q, emit(R.tile(k, [1, 2, 1, 1])), v),
        tensor(1, 8, 5, 8),
        tensor(1, 2, 5, 8),
        tensor(1, 4, 5, 8),
    )
    out, rows = prune(mod)
    assert out.same_as(mod)
    assert not rows


def rules_of(rows):
    return [(row.rule, row.changed) for row in rows]


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


DIAGONAL = np.eye(4, dtype=bool)
SEEN = {
    "causal": (qkv(S, S), {"causal": 0}),
    "window": (qkv(S, S), {"causal": 0, "window": 3}),
    "last to last": (qkv(3, 9), {"causal": "bottom_right"}),
    "constant mask": (qkv(4, 4), {"bias": DIAGONAL[:, ::-1].copy()}),
    "constant mask, causal": (qkv(4, 4), {"bias": DIAGONAL, "causal": 0}),
    "constant bias": (qkv(4, 4), {"bias": np.where(DIAGONAL, 0, -np.inf).astype("float32")}),
}


@pytest.mark.parametrize("empty_row", ["zero", "uniform"])
@pytest.mark.parametrize("name", SEEN)
def test_rows_that_see_a_key_need_no_other_value(name, empty_row):
    types, attributes = SEEN[name]
    mod = attend(*types, **attributes, empty_row=empty_row)
    out, rows = prune(mod, "empty-rows")
    assert rules_of(rows) == [("empty-rows", True)]
    assert call(out).attrs["empty_row"] == "nan"
    assert_same_values(mod, out, (5,), (1,))


EMPTY = {
    "negative offset": (qkv(5, 9), {"causal": -1}),
    "last to last, fewer keys": (qkv(5, 4), {"causal": "bottom_right"}),
    "window behind the keys": (qkv(9, 5), {"window": 3}),
    "no key": (qkv(*symbols("st")), {}),
    "lengths unknown": (qkv(*symbols("st")), {"causal": "bottom_right"}),
    "constant mask": (qkv(4, 4), {"bias": DIAGONAL & (np.arange(4) > 0)}),
    "constant mask, causal": (qkv(4, 4), {"bias": DIAGONAL[::-1].copy(), "causal": 0}),
    "all of the lowest number": (qkv(2, 2), {"bias": np.full((2, 2), np.finfo("float32").min)}),
    "mask at run time": ((*qkv(4, 4), tensor(4, 4, dtype="bool")), {}),
    "bias at run time": ((*qkv(4, 4), tensor(4, 4)), {"causal": 0}),
}


@pytest.mark.parametrize("name", EMPTY)
def test_rows_that_may_be_empty_keep_their_value(name):
    types, attributes = EMPTY[name]
    mod = attend(*types, **attributes, empty_row="zero")
    out, rows = prune(mod, "empty-rows")
    assert out.same_as(mod)
    assert rules_of(rows) == [("empty-rows", False)]
    assert rows[0].reason.startswith("empty_row=zero stays: ")


def test_bounds_of_the_function_prove_that_there_are_keys():
    types = qkv(*symbols("st"))
    mod = attend(*types, empty_row="zero")
    mod["main"] = mod["main"].with_attr("tir_var_lower_bound", {"t": 1})
    out, _ = prune(mod, "empty-rows")
    assert call(out).attrs["empty_row"] == "nan"
    assert_same_values(mod, out, (3, 1), (1, 4))


def _zero(emit, x):
    return emit(R.zeros(x.ty.shape, x.ty.dtype))


def _of_one_key(emit, x):
    first = emit(R.strided_slice(x, [2], [0], [1], assume_inbound=True))
    return emit(R.broadcast_to(first, x.ty.shape))


EQUAL_SCORES = {
    "q is 0": lambda emit, q, k, v: attention(_zero(emit, q), k, v),
    "k is 0": lambda emit, q, k, v: attention(q, _zero(emit, k), v, empty_row="uniform"),
    "scale is 0": lambda emit, q, k, v: attention(q, k, v, scale=0.0),
    "one key for all": lambda emit, q, k, v: attention(q, _of_one_key(emit, k), v, softcap=3.0),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("name", EQUAL_SCORES)
def test_equal_scores_give_the_mean(name, dtype):
    (b,) = symbols("b")
    mod = function(EQUAL_SCORES[name], *qkv(5, 7, batch=b, dtype=dtype))
    out, rows = prune(mod, "uniform-rows")
    assert rules_of(rows) == [("uniform-rows", True)]
    assert ops(out)["sits.attention"] == 0
    assert_same_values(mod, out, (2,), (9,))


MASKED_OR_EMPTY = {
    "causal": (qkv(5, 5), {"causal": 0}),
    "window": (qkv(5, 5), {"window": 2}),
    "bias": ((*qkv(5, 5), tensor(5, 5)), {}),
    "lengths unknown": (qkv(*symbols("st")), {}),
}


@pytest.mark.parametrize("name", MASKED_OR_EMPTY)
def test_equal_scores_under_a_mask_are_a_fact_alone(name):
    types, attributes = MASKED_OR_EMPTY[name]
    mod = attend(*types, **attributes, scale=0.0)
    out, rows = prune(mod, "uniform-rows")
    assert out.same_as(mod)
    assert rules_of(rows) == [("uniform-rows", False)]
    assert "all weights of a row are equal" in rows[0].reason
    assert "not rewritten" in rows[0].reason
