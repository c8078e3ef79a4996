"""PruneRedundantAttention: shared values, neutral operations, facts, and the pass as a whole."""

import time

import numpy as np
import pytest
from pruning import assert_checked, assert_same_values, function, ops, prune, tensor
from tvm import relax, tirx
from tvm.relax import op as R
from tvm.script import ir as I
from tvm.script import relax as RS

from relax_passes.op import attention
from relax_passes.prune_redundant_attention import PruneRedundantAttention
from sits_tvm import Report
from sits_tvm.config import GRAPH_RULES

S = tirx.Var("s", "int64")


def layers(number=3):
    """Each layer makes the mask, the rotary table, keys and values anew."""

    def make(emit, x, w):
        for _ in range(number):
            place = emit(R.expand_dims(emit(R.arange(0, S, 1, "int64")), 1))
            table = emit(R.cos(emit(R.astype(place, "float32"))))
            query = emit(R.expand_dims(emit(R.arange(0, S, 1, "int64")), 1))
            mask = emit(R.less_equal(emit(R.arange(0, S, 1, "int64")), query))
            k = emit(R.multiply(emit(R.matmul(w, w)), table))
            x = emit(attention(emit(R.multiply(x, table)), k, k, mask, scale=0.25))
        return x

    return function(make, tensor(1, 2, S, S), tensor(1, 2, S, S))


def test_masks_tables_and_keys_are_computed_once_for_all_layers():
    mod = layers()
    out, rows = prune(mod, "common-subexpressions")
    once = dict.fromkeys(("arange", "expand_dims", "cos", "astype", "less_equal", "matmul"), 1)
    assert ops(out) == {**once, "multiply": 1 + 3, "sits.attention": 3}
    table = next(row for row in rows if row.binding == "lv3")
    assert table.reason == "the same op on the same arguments as `lv15`, `lv27`: computed once"
    assert_same_values(mod, out, (5,), (1,), exact=True)


def test_what_is_not_the_same_is_not_shared():
    def make(emit, x, y):
        parts = [
            R.add(x, y), R.add(y, x), R.add(x, x),
            R.sum(x, axis=0), R.sum(x, axis=1), R.full((4, 4), relax.const(0.0), "float32"),
            R.full((4, 4), relax.const(-0.0), "float32"), R.multiply(x, relax.const(2.0)),
            R.multiply(x, relax.const(3.0)),
        ]  # fmt: skip
        return relax.Tuple([emit(part) for part in parts])

    mod = function(make, tensor(4, 4), tensor(4, 4))
    assert prune(mod, "common-subexpressions") == (mod, [])


def test_dropout_and_opaque_calls_are_not_shared():
    def make(emit, x):
        drop = [emit(emit(R.nn.dropout(x, 0.5))[0]) for _ in range(2)]
        draw = [emit(R.call_pure_packed("draw", x, ty_args=tensor(4))) for _ in range(2)]
        return relax.Tuple([*drop, *draw])

    mod = function(make, tensor(4))
    assert prune(mod) == (mod, [])


def test_results_may_be_shared():
    def make(emit, x):
        return relax.Tuple([emit(R.cos(x)), emit(R.cos(x))])

    mod = function(make, tensor(S))
    out, _ = prune(mod)
    assert ops(out) == {"cos": 1}
    assert_same_values(mod, out, (5,), exact=True)


@I.ir_module
class TwoBlocks:
    @RS.function
    def main(x: RS.Tensor((4,), "float32")):
        with RS.dataflow():
            a = RS.cos(x)
            b = RS.reshape(a, (2, 2))
            RS.output(b)
        f = RS.cos(x)
        g = RS.cos(x)
        with RS.dataflow():
            c = RS.cos(x)
            d = RS.reshape(b, (4,))
            e = RS.add(c, d)
            RS.output(e)
        return (e, f, g)


def test_nothing_is_taken_from_another_block():
    """`a` and `c` are not visible outside of theirs."""
    assert prune(TwoBlocks) == (TwoBlocks, [])


NEUTRAL = {
    "times 1": lambda x, one, zero: R.multiply(x, one),
    "1 times": lambda x, one, zero: R.multiply(one, x),
    "times ones": lambda x, one, zero: R.multiply(x, R.reshape(R.ones((2, 2), x.ty.dtype), (4,))),
    "over 1": lambda x, one, zero: R.divide(x, one),
    "minus 0": lambda x, one, zero: R.subtract(x, zero),
    "cast to itself": lambda x, one, zero: R.astype(x, x.ty.dtype),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_operations_go(name, dtype):
    one, zero = (relax.const(np.full((1,), n, dtype), dtype) for n in (1, 0))
    mod = function(
        lambda emit, x: R.negative(emit(NEUTRAL[name](x, one, zero))), tensor(S, 4, dtype=dtype)
    )
    out, rows = prune(mod, "neutral-operations")
    assert ops(out) == {"negative": 1}
    assert "is `a0`" in rows[0].reason or "already" in rows[0].reason


NOT_NEUTRAL = {
    "1 over": (lambda x: R.divide(relax.const(1.0), x), "float32"),
    "0 minus": (lambda x: R.subtract(relax.const(0.0), x), "float32"),
    "minus -0, of -0": (lambda x: R.subtract(x, relax.const(-0.0)), "float32"),
    "0 plus, of -0": (lambda x: R.add(x, relax.const(0.0)), "float32"),
    "nearly 1": (lambda x: R.multiply(x, relax.const(1.0000001)), "float32"),
    "not all 1": (
        lambda x: R.multiply(x, relax.const(np.array([1, 1, 1, 2], "float32"))),
        "float32",
    ),
    "1 in more axes": (
        lambda x: R.multiply(x, relax.const(np.ones((2, 1, 1), "float32"))),
        "float32",
    ),
    "another dtype": (lambda x: R.astype(x, "float16"), "float32"),
}


@pytest.mark.parametrize("name", NOT_NEUTRAL)
def test_other_operations_stay(name):
    make, dtype = NOT_NEUTRAL[name]
    mod = function(lambda emit, x: make(x), tensor(S, 4, dtype=dtype))
    assert prune(mod, "neutral-operations") == (mod, [])


def test_the_integer_0_is_not_added():
    mod = function(
        lambda emit, x: R.negative(emit(R.add(relax.const(0, "int64"), x))),
        tensor(4, dtype="int64"),
    )
    out, _ = prune(mod, "neutral-operations")
    assert ops(out) == {"negative": 1}


def everything():
    """One of each kind of redundancy, in two layers."""

    def make(emit, x, k):
        out = x
        for _ in range(2):
            q = emit(R.multiply(out, relax.const(1.0)))
            q = emit(R.reshape(emit(R.reshape(q, (4, S, 8))), (1, 4, S, 8)))
            twice = emit(R.repeat(k, 2, axis=1))
            out = emit(attention(q, twice, twice, causal=0, window=0, empty_row="zero"))
        return out

    return function(make, tensor(1, 4, S, 8), tensor(1, 2, S, 8))


def test_each_rule_can_be_left_out():
    mod = everything()
    found = {row.rule for row in prune(mod)[1] if row.changed}
    assert found == {"views", "neutral-operations", "repeated-heads", "empty-rows"}
    for rule in found:
        rows = prune(mod, *(set(GRAPH_RULES) - {rule}))[1]
        assert rule not in {row.rule for row in rows}
        assert {row.rule for row in rows if row.changed} >= found - {rule}


def test_no_rule_no_change():
    mod = everything()
    assert PruneRedundantAttention(())(mod).same_as(mod)


def test_rules_have_to_exist():
    for rules in (["cse"], "cse"):
        with pytest.raises(ValueError, match=r"rules=\['cse'\]: write a set of views, common-sub"):
            PruneRedundantAttention(rules)
    with pytest.raises(ValueError, match=r"rules=.*Report: empty.*: write a set of"):
        PruneRedundantAttention(Report())


def test_rows_name_function_binding_and_proof():
    report = Report()
    PruneRedundantAttention(report=report)(everything())
    row = next(row for row in report.attention_rewrites if row.rule == "empty-rows")
    assert (row.function, row.binding, row.changed) == ("main", "lv4", True)
    assert row.reason == "every query sees at least one of s keys: causal offset 0"
    assert "redundancy: 8 rewritten, 0 left" in str(report)


def test_all_rules_together_keep_the_values():
    mod = everything()
    out, _ = prune(mod)
    assert ops(out) == {"sits.attention": 2}
    assert_same_values(mod, out, (5,), (1,))


def test_time_is_linear_in_layers():
    def seconds(number):
        mod = layers(number)
        start = time.perf_counter()
        PruneRedundantAttention()(mod)
        return time.perf_counter() - start

    seconds(2)
    few, many = seconds(10), seconds(80)
    assert many < 3 * 8 * few


def _dead_guard(emit, q, k):
    """What is left of attention that returns its weights."""
    scores = emit(R.matmul(q, emit(R.permute_dims(k, [0, 1, 3, 2]))))
    scores = emit(R.subtract(scores, emit(R.max(scores, axis=-1, keepdims=True))))
    weights = emit(R.nn.softmax(scores))
    return R.where(emit(R.isnan(weights)), relax.const(0.0), weights)


CHECKED = {
    "views, neutral-operations, repeated-heads, empty-rows": everything,
    "common-subexpressions": layers,
    "double-stabilisation": lambda: function(_dead_guard, *[tensor(1, 2, S, 8)] * 2),
    "hidden-keys": lambda: function(
        lambda emit, q, k: attention(q, k, k, causal=4, window=2),
        tensor(1, 2, 3, 8),
        tensor(1, 2, 9, 8),
    ),
    "uniform-rows": lambda: function(
        lambda emit, q, k: attention(q, k, k, scale=0.0), *[tensor(1, 2, 5, 8)] * 2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_compiled_values_on_the_draws_of_verify(name):
    mod = CHECKED[name]()
    out, rows = prune(mod)
    assert set(name.split(", ")) <= {row.rule for row in rows if row.changed}
    assert_checked(mod, out)
