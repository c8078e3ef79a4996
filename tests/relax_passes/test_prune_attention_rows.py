"""PruneRedundantAttention at R.sits.attention: repeated heads, empty rows, equal scores."""

import numpy as np
import pytest
from pruning import (
    assert_same_values,
    attend,
    call,
    function,
    ops,
    prune,
    qkv,
    rules_of,
    symbols,
    tensor,
)
from tvm import tirx
from tvm.relax import op as R

from relax_passes.op import attention

S = tirx.Var("s", "int64")


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


def _heads(emit, x, order, join=R.concat):
    """Slices of one head each, in an order."""
    heads = [emit(R.strided_slice(x, [1], [g], [g + 1])) for g in range(2)]
    if join is R.stack:
        heads = [emit(R.squeeze(head, 1)) for head in heads]
    return emit(join([heads[g] for g in order], axis=1))


def _joined(emit, x):
    return _heads(emit, x, [0, 0, 1, 1])


def _stacked(emit, x):
    return _heads(emit, x, [0, 0, 1, 1], R.stack)


@pytest.mark.parametrize("repeat", [_expand, _repeat, _turned, _joined, _stacked])
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


TILED = "head h % 2 of `a1`"
SPREAD = {
    "tile": (lambda emit, x: emit(R.tile(x, [1, 2, 1, 1])), TILED),
    "concat": (lambda emit, x: _heads(emit, x, [0, 1, 0, 1]), TILED),
    "stack": (lambda emit, x: _heads(emit, x, [0, 1, 0, 1], R.stack), TILED),
    "irregular": (lambda emit, x: _heads(emit, x, [0, 1, 1, 0]), "in one of `lv`, `lv1`"),
}


@pytest.mark.parametrize("name", SPREAD)
def test_heads_that_are_not_in_groups_stay(name):
    """Query head h would read head h mod 2."""
    spread, head = SPREAD[name]
    mod = function(
        lambda emit, q, k, v: attention(q, spread(emit, k), v),
        tensor(1, 8, 5, 8),
        tensor(1, 2, 5, 8),
        tensor(1, 4, 5, 8),
    )
    out, rows = prune(mod)
    assert out.same_as(mod)
    reason = f"heads are repeated, but not in groups: head h of k is {head}"
    assert [(row.changed, row.reason) for row in rows] == [(False, reason)]


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
