"""What prune_redundant_heads leaves alone, and the reason that it gives."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.relax import op as R

from relax_passes.prune_redundant_heads import prune_redundant_heads
from sits_tvm import Report
from tests.relax_passes import planted_redundancy
from tests.relax_passes.planted_redundancy import (
    Block,
    copy_rows,
    module,
    random_params,
    zero_output,
    zero_value,
)
from tests.relax_passes.pruned_heads import (
    BLOCKS,
    heads_of,
    planted,
    pruned,
)


@pytest.mark.parametrize("name", BLOCKS)
def test_random_weights_have_nothing_to_prune(name, rng):
    mod, params = planted(BLOCKS[name], lambda p: None, rng)
    out, left, rows = pruned(mod, params)
    assert_structural_equal(out, mod)
    assert left.keys() == params.keys()
    assert [row.changed for row in rows] == [False, False]
    assert "nothing pruned: no zero, constant or equal one" in rows[0].reason


def test_permuted_dimensions_are_another_head_under_rotary_embedding(rng):
    block = Block(rope=True)
    order = np.roll(np.arange(block.dim), 1)

    def plant(params):
        copy_rows(block, params, "q", 0, 3, 1.0, order)
        copy_rows(block, params, "k", 0, 3, 1.0, order)

    mod, params = planted(block, plant, rng)
    assert_structural_equal(pruned(mod, params)[0], mod)


@pytest.mark.parametrize("name", ["mha", "rope"])
@pytest.mark.parametrize("change", ["one ulp", "cosine 0.999", "query scale 2, key scale 1"])
def test_near_duplicates_are_not_found(name, change, rng):
    block = BLOCKS[name]

    def plant(params):
        for part in "qkv":
            copy_rows(block, params, part, 0, 3)
        key, query = params["0.k.weight"], params["0.q.weight"]
        if change == "one ulp":
            key[24, 5] = np.nextafter(key[24, 5], np.float32(9))
        elif change == "cosine 0.999":
            key[24:] += 0.03 * rng.standard_normal((8, 24)).astype("float32") / 24**0.5
        else:
            query[24:] *= 2
            query[24, 3] *= np.float32(1 + 2**-20)

    mod, params = planted(block, plant, rng)
    assert_structural_equal(pruned(mod, params)[0], mod)


@pytest.mark.parametrize("part", "qkv")
@pytest.mark.parametrize("plant", [zero_output, zero_value])
def test_a_dead_head_that_holds_nan_stays(plant, part, rng):
    """0 times NaN is NaN, which the head adds to every output."""
    block = BLOCKS["mha"]

    def edit(params):
        plant(block, params, 1)
        params[f"0.{part}.bias"][8] = np.nan

    mod, params = planted(block, edit, rng)
    out, _, rows = pruned(mod, params)
    assert_structural_equal(out, mod)
    dead = plant is zero_output or part != "v"
    assert ("heads 1 add nothing but NaN" in rows[0].reason) == dead


@pytest.mark.parametrize("empty_row", ["nan", "zero"])
def test_a_dead_head_whose_rows_alone_may_be_empty_stays(empty_row, rng):
    """A mask of its own may make its rows NaN, and no other head's."""
    block = Block(causal=None, padding="per head", empty_row=empty_row)
    mod, params = planted(block, lambda p: zero_output(block, p, 1), rng)
    out, _, _ = pruned(mod, params)
    left = 4 if empty_row == "nan" else 3
    assert heads_of(out) == [(left, left, 8)]


def test_query_heads_of_constant_values_stay_together(rng):
    """One of the two holds NaN, so their values are not folded into the output."""
    block = BLOCKS["gqa"]

    def plant(params):
        zero_value(block, params, 0)
        params["0.q.bias"][8] = np.nan

    mod, params = planted(block, plant, rng)
    assert_structural_equal(pruned(mod, params, rules={"constant-values"})[0], mod)


@pytest.mark.parametrize("fault", ["sum", "scale"])
def test_rows_that_float16_cannot_hold_are_not_written(fault, rng):
    block = Block(dtype="float16", bias=False)

    def plant(params):
        for part in "qk":
            copy_rows(block, params, part, 0, 1)
        value = params["0.v.weight"]
        value[:8] = np.round(value[:8] * 8) / 8
        copy_rows(block, params, "v", 0, 1, 1.0 if fault == "sum" else 2.0**-8)
        params["0.o.weight"][:, :16] = 4e4 if fault == "sum" else 4e2

    mod, params = planted(block, plant, rng)
    out, _, rows = pruned(mod, params, rules={"equal-heads"})
    assert_structural_equal(out, mod)
    assert "new rows of the output projection in float16 would be off by inf" in rows[0].reason


def test_layers_that_share_weights_are_left_alone(rng):
    block = Block(bias=False)
    params = random_params(block, rng, layers=1)
    zero_output(block, params, 2)
    tied = module(block, params, layers=2, tied=True)
    out, _, rows = pruned(tied, params)
    assert_structural_equal(out, tied)
    assert {"is tied" in row.reason for row in rows} == {True}


def test_keys_that_are_an_output_too_keep_the_weights(rng):
    """A cache that leaves the function holds every head."""
    block = BLOCKS["mha"]
    mod, params = planted(block, lambda p: zero_output(block, p, 2), rng)
    main = mod["main"]
    keys = next(
        b.value.args[1]
        for b in main.body.blocks[0].bindings
        if isinstance(b.value, relax.Call) and b.value.op.name == "relax.sits.attention"
    )
    with_keys, report = returning(main, keys), Report()
    out, _ = prune_redundant_heads(with_keys, params, report=report)
    assert_structural_equal(out, with_keys)
    assert "also read by" in report.attention_rewrites[0].reason


def returning(main, extra):
    """main returning (result, extra)."""
    bindings = list(main.body.blocks[0].bindings)
    out = relax.Var("keys", extra.ty)
    block = relax.DataflowBlock([*bindings, relax.VarBinding(out, extra)])
    result = relax.BlockBuilder().normalize(relax.Tuple([main.body.body, out]))
    body = relax.SeqExpr([block], result)
    return tvm.IRModule({"main": relax.Function(main.params, body, result.ty, True, main.attrs)})


def test_weights_that_are_not_given_are_named(rng):
    block = BLOCKS["mha"]
    mod, params = planted(block, lambda p: zero_output(block, p, 2), rng)
    out, _, rows = pruned(mod, {n: p for n, p in params.items() if n != "0.k.weight"})
    assert_structural_equal(out, mod)
    assert "k is made of `0.k.weight`, which is no weight" in rows[0].reason


def test_an_unknown_rule_is_an_error(rng):
    mod, params = planted(BLOCKS["mha"], lambda p: None, rng)
    with pytest.raises(
        ValueError, match=r"rules=\['merge'\]: there are zero-heads, constant-values"
    ):
        prune_redundant_heads(mod, params, rules={"merge"})


def test_a_vector_that_is_multiplied_by_the_input_is_no_bias(rng, monkeypatch):
    """Values of x W + x₀ w with W = 0 differ by position."""

    def linear(bb, x, weights, name):
        if name != "0.v":
            return plain(bb, x, weights, name)
        first = bb.emit(R.strided_slice(x, [2], [0], [1]))
        row = bb.emit(R.expand_dims(weights["0.v.bias"], 0))
        product = plain(bb, x, {"0.v.weight": weights["0.v.weight"]}, name)
        return bb.emit(R.add(product, bb.emit(R.matmul(first, row))))

    plain, block = planted_redundancy._linear, BLOCKS["mha"]
    monkeypatch.setattr(planted_redundancy, "_linear", linear)
    mod, params = planted(block, lambda p: zero_value(block, p, 1), rng)
    assert_structural_equal(pruned(mod, params, rules={"constant-values"})[0], mod)
