"""prune_redundant_heads on models with planted redundancy: what is there is found, nothing else."""

import re

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal

import sits_tvm
from relax_passes.prune_redundant_heads import prune_redundant_heads
from sits_tvm import Report
from sits_tvm.gradient_check.twin import Twin
from tests.relax_passes.planted_redundancy import (
    Block,
    copy_rows,
    low_rank,
    module,
    pack,
    random_params,
    zero_output,
    zero_value,
)

BLOCKS = {
    "mha": Block(),
    "mha packed": Block(packed=True, bias=False),
    "rope": Block(rope=True, bias=False),
    "gqa": Block(kv_heads=2, rope=True),
    "gqa packed": Block(heads=6, kv_heads=2, packed=True),
}


def planted(block, plant, rng, layers=1):
    params = random_params(block, rng, layers)
    plant(params)
    params = pack(block, params)
    return module(block, params, layers), params


def pruned(mod, params, **options):
    report, digest = Report(), tvm.ir.save_json(mod)
    out, left = prune_redundant_heads(mod, params, report=report, **options)
    relax.analysis.well_formed(out)
    assert tvm.ir.save_json(mod) == digest
    return out, left, report.attention_rewrites


def heads_of(mod):
    """(H, G, Dv) of every attention."""
    found = []

    def visit(expr):
        if isinstance(expr, relax.Call) and expr.op == tvm.ir.Op.get("relax.sits.attention"):
            q, _, v = expr.args[:3]
            found.append((int(q.ty.shape[1]), int(v.ty.shape[1]), int(v.ty.shape[3])))

    relax.analysis.post_order_visit(mod["main"], visit)
    return sorted(found)


def same_numbers(mod, params, out, left, block, rng, tolerance=1e-6):
    """In float64: what is left is the rounding of changed weights to their dtype."""
    x = rng.standard_normal((2, 5, block.hidden))
    mask = np.ones((2, 1, 1, 5), bool)
    mask[0, :, :, 3:] = False
    inputs = [x, mask] if block.padding else [x]
    results = [in_float64(m, inputs, p) for m, p in ((mod, params), (out, left))]
    np.testing.assert_allclose(*results, rtol=0, atol=tolerance * np.abs(results[0]).max())


def in_float64(mod, inputs, params):
    torch = pytest.importorskip("torch")
    names = [a.name for a in mod["main"].params[len(inputs) :]]
    args = [*inputs, *(params[name].astype("float64") for name in names)]
    return Twin(mod, "main").run([torch.from_numpy(a) for a in args]).outputs.detach().numpy()


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


def powers(block, rng):
    return 2.0 ** rng.integers(-3, 4, block.dim) * rng.choice([-1, 1], block.dim)


def copy_map(block, params, source, target, rng):
    """The same map, spelled differently: per dimension, or with rotary embedding as a whole."""
    scale = -4.0 if block.rope else powers(block, rng)
    order = None if block.rope else rng.permutation(block.dim)
    ratio = block.heads // block.kv_heads
    copy_rows(block, params, "q", source, target, scale, order)
    if ratio == 1:
        copy_rows(block, params, "k", source, target, 1 / np.asarray(scale), order)


def copy_values(block, params, source, target, rng):
    copy_rows(block, params, "v", source, target, powers(block, rng), rng.permutation(block.dim))


@pytest.mark.parametrize("name", BLOCKS)
def test_random_weights_have_nothing_to_prune(name, rng):
    mod, params = planted(BLOCKS[name], lambda p: None, rng)
    out, left, rows = pruned(mod, params)
    assert_structural_equal(out, mod)
    assert left.keys() == params.keys()
    assert [row.changed for row in rows] == [False, False]
    assert "nothing pruned: no zero, constant or equal one" in rows[0].reason


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


@pytest.mark.parametrize("name", ["mha", "gqa packed"])
@pytest.mark.parametrize("part", "qkvo")
def test_projections_of_low_rank_become_factors(name, part, rng):
    block = BLOCKS[name]
    mod, params = planted(block, lambda p: low_rank(block, p, part, 3, rng), rng)
    out, left, rows = pruned(mod, params)
    assert re.search(rf"\b{part} \d+×\d+: rank 3, ‖W - A·B‖₂ ≤", rows[1].reason)
    assert rows[1].reason.count("‖W - A·B‖₂") == 1
    assert [n for n in left if n.endswith(".left")]
    assert rows[1].changed
    same_numbers(mod, params, out, left, block, rng)


def test_a_rank_that_saves_nothing_stays(rng):
    """24·32 / (24 + 32) = 13.7"""
    block = BLOCKS["mha"]
    mod, params = planted(block, lambda p: low_rank(block, p, "q", 14, rng), rng)
    out, _, rows = pruned(mod, params)
    assert_structural_equal(out, mod)
    assert "q 32×24: rank ≥ 14, from where factors save nothing" in rows[1].reason


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


def test_layers_that_share_weights_are_left_alone(rng):
    block = Block(bias=False)
    params = random_params(block, rng, layers=1)
    zero_output(block, params, 2)
    tied = module(block, params, layers=2, tied=True)
    out, _, rows = pruned(tied, params)
    assert_structural_equal(out, tied)
    assert all("is tied" in row.reason for row in rows)


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


def test_an_unknown_rule_is_an_error(rng):
    mod, params = planted(BLOCKS["mha"], lambda p: None, rng)
    with pytest.raises(ValueError, match=r"rules=\['merge'\]: there are constant-values"):
        prune_redundant_heads(mod, params, rules={"merge"})
