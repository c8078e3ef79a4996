"""prune_redundant_heads on models with planted redundancy: what is there is found."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal

import sits_tvm
from tests.relax_passes.planted_redundancy import (
    Block,
    copy_rows,
    low_rank,
    zero_output,
    zero_value,
)
from tests.relax_passes.pruned_heads import (
    BLOCKS,
    copy_map,
    copy_values,
    heads_of,
    planted,
    pruned,
    same_numbers,
)


@pytest.mark.parametrize("name", ["rope", "gqa packed"])
def test_compiled_results_stay(name, rng):
    """Values of heads side by side, and factors of a packed weight."""
    block = BLOCKS[name]

    def plant(params):
        if name == "rope":
            copy_map(block, params, 0, 3, rng)
        else:
            low_rank(block, params, "q", 3, rng)

    mod, params = planted(block, plant, rng)
    out, left, _ = pruned(mod, params)
    x = rng.standard_normal((2, 5, block.hidden)).astype("float32")
    results = []
    for m, p in ((mod, params), (out, left)):
        ex = sits_tvm.build(m, "llvm", params=p, config=sits_tvm.Config(attention="off"))
        vm = relax.VirtualMachine(ex, tvm.cpu())
        results.append(vm["main"](x, *ex.param_list).numpy())
    assert not np.array_equal(*results)
    np.testing.assert_allclose(*results, rtol=0, atol=2e-6 * np.abs(results[0]).max())


@pytest.mark.parametrize("name", ["mha", "mha packed", "rope"])
def test_a_head_that_the_output_ignores_goes_with_its_weights(name, rng):
    block = BLOCKS[name]
    mod, params = planted(block, lambda p: zero_output(block, p, 2), rng)
    out, left, rows = pruned(mod, params)
    assert heads_of(out) == [(3, 3, 8)]
    assert sum(p.size for p in left.values()) < 0.8 * sum(p.size for p in params.values())
    assert "heads 2 are all zero" in rows[0].reason
    same_numbers(mod, params, out, left, block, rng)


def test_one_dead_head_of_a_group_stays_and_the_report_says_why(rng):
    block = BLOCKS["gqa"]
    mod, params = planted(block, lambda p: zero_output(block, p, 0), rng)
    out, _, rows = pruned(mod, params)
    assert_structural_equal(out, mod)
    assert rows[0].reason.startswith("nothing pruned: columns of the output projection of heads 0")
    assert "with its whole group, or with one of every other group" in rows[0].reason


@pytest.mark.parametrize(
    ("dead", "left_over"), [((0, 1), (2, 1, 8)), ((0, 3), (2, 2, 8)), ((0, 1, 2), (1, 1, 8))]
)
def test_whole_groups_and_one_head_of_every_group_go(dead, left_over, rng):
    block = BLOCKS["gqa"]

    def plant(params):
        for head in dead:
            zero_output(block, params, head)

    mod, params = planted(block, plant, rng)
    out, left, _ = pruned(mod, params)
    assert heads_of(out) == [left_over]
    same_numbers(mod, params, out, left, block, rng)


def test_query_heads_of_one_key_value_head_go_alone(rng):
    """Also one that is equal to another."""
    block = BLOCKS["mqa"]

    def plant(params):
        zero_output(block, params, 3)
        copy_rows(block, params, "q", 0, 1)

    mod, params = planted(block, plant, rng)
    out, left, _ = pruned(mod, params)
    assert heads_of(out) == [(2, 1, 8)]
    same_numbers(mod, params, out, left, block, rng)


@pytest.mark.parametrize(("name", "heads"), [("mha", (3, 3, 8)), ("gqa", (2, 1, 8))])
def test_values_that_are_a_bias_go_into_the_output(name, heads, rng):
    block = BLOCKS[name]
    mod, params = planted(block, lambda p: zero_value(block, p, 1), rng)
    out, left, rows = pruned(mod, params)
    assert heads_of(out) == [heads]
    assert "0.o.folded_bias" in left
    assert "softmax rows sum to 1" in rows[0].reason
    same_numbers(mod, params, out, left, block, rng)


def test_constant_values_stay_where_a_row_may_be_empty(rng):
    """An empty row gives 0 here, not the bias."""
    block = Block(padding=True, causal=None, empty_row="zero")
    mod, params = planted(block, lambda p: zero_value(block, p, 1), rng)
    out, _, _ = pruned(mod, params)
    assert_structural_equal(out, mod)


def test_a_padding_mask_does_not_keep_a_dead_head(rng):
    block = Block(padding=True, causal=None, empty_row="zero")
    mod, params = planted(block, lambda p: zero_output(block, p, 1), rng)
    out, left, _ = pruned(mod, params)
    assert heads_of(out) == [(3, 3, 8)]
    same_numbers(mod, params, out, left, block, rng)


@pytest.mark.parametrize("name", ["mha", "mha packed", "rope"])
def test_equal_heads_become_one(name, rng):
    block = BLOCKS[name]

    def plant(params):
        copy_map(block, params, 0, 3, rng)
        copy_values(block, params, 0, 3, rng)

    mod, params = planted(block, plant, rng)
    out, left, rows = pruned(mod, params)
    assert heads_of(out) == [(3, 3, 8)]
    assert "maps of heads 0, 3 are equal" in rows[0].reason
    same_numbers(mod, params, out, left, block, rng)


def test_equal_query_heads_of_every_group_become_one(rng):
    """Query heads of a group share their values."""
    block = BLOCKS["gqa"]

    def plant(params):
        copy_rows(block, params, "q", 0, 1)
        copy_rows(block, params, "q", 3, 2)

    mod, params = planted(block, plant, rng)
    out, left, _ = pruned(mod, params)
    assert heads_of(out) == [(2, 2, 8)]
    same_numbers(mod, params, out, left, block, rng)


@pytest.mark.parametrize("name", ["mha", "rope"])
def test_equal_maps_are_computed_once_for_values_side_by_side(name, rng):
    block = BLOCKS[name]
    mod, params = planted(block, lambda p: copy_map(block, p, 0, 3, rng), rng)
    out, left, rows = pruned(mod, params)
    assert heads_of(out) == [(1, 1, 16), (2, 2, 8)]
    assert "saves 1·8 multiply-adds per query and visible key" in rows[0].reason
    same_numbers(mod, params, out, left, block, rng)
    unshared, _, _ = pruned(mod, params, rules={"equal-heads"})
    assert_structural_equal(unshared, mod)


def test_pairs_of_equal_maps_stay_one_attention(rng):
    block = BLOCKS["mha"]

    def plant(params):
        copy_map(block, params, 0, 3, rng)
        copy_map(block, params, 1, 2, rng)

    mod, params = planted(block, plant, rng)
    out, left, _ = pruned(mod, params)
    assert heads_of(out) == [(2, 2, 16)]
    same_numbers(mod, params, out, left, block, rng)


def test_float16_weights(rng):
    block = Block(dtype="float16")

    def plant(params):
        zero_output(block, params, 1)
        low_rank(block, params, "v", 3, rng)

    mod, params = planted(block, plant, rng)
    out, left, rows = pruned(mod, params)
    assert heads_of(out) == [(3, 3, 8)]
    assert rows[1].changed
    same_numbers(mod, params, out, left, block, rng, tolerance=2e-3)


def test_constants_are_weights(rng):
    block = BLOCKS["mha"]
    mod, params = planted(block, lambda p: zero_output(block, p, 2), rng)
    bound = relax.transform.BindParams("main", params)(mod)
    out, left, _ = pruned(bound, {})
    assert heads_of(out) == [(3, 3, 8)]
    assert left == {}
    same_numbers(bound, {}, out, {}, block, rng)


def test_all_heads_dead_keeps_one_group(rng):
    block = BLOCKS["mha"]

    def plant(params):
        for head in range(4):
            zero_output(block, params, head)

    mod, params = planted(block, plant, rng)
    out, left, _ = pruned(mod, params)
    assert heads_of(out) == [(1, 1, 8)]
    same_numbers(mod, params, out, left, block, rng)


def test_a_second_run_changes_nothing(rng):
    block = BLOCKS["gqa"]

    def plant(params):
        zero_output(block, params, 0)
        zero_output(block, params, 1)
        low_rank(block, params, "q", 3, rng)

    mod, params = planted(block, plant, rng)
    out, left, _ = pruned(mod, params)
    again, same, _ = pruned(out, left)
    assert_structural_equal(again, out)
    assert same.keys() == left.keys()


def test_weights_of_one_input_are_no_bias(rng):
    """(N, 1) of zeros, in the form in which a bias of N is seen."""
    block = Block(hidden=1)
    mod, params = planted(block, lambda p: zero_value(block, p, 2), rng)
    out, left, _ = pruned(mod, params, rules={"constant-values"})
    assert heads_of(out) == [(3, 3, 8)]
    same_numbers(mod, params, out, left, block, rng)
