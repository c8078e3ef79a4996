"""prune_redundant_heads on projections of low rank."""

import re

import pytest
from tvm.ir import assert_structural_equal

from tests.relax_passes.planted_redundancy import (
    low_rank,
)
from tests.relax_passes.pruned_heads import (
    BLOCKS,
    planted,
    pruned,
    same_numbers,
)


@pytest.mark.parametrize("name", ["mha", "mqa", "gqa packed"])
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
