"""`Config.attention` and `Config.verify` in a build."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm
from small_modules import one_function
from tvm import relax, tirx
from tvm.relax import op as R

import sits_tvm
from relax_passes.head_rules import low_rank_rewrite
from relax_passes.head_rules.low_rank import low_rank_factors
from relax_passes.packed_weights.weight_sites import MATMUL
from relax_passes.prune_rules import block
from relax_passes.prune_rules.rule import Outcome, Rule
from sits_tvm import Config, SitsError
from tests.relax_passes.planted_redundancy import Block, low_rank, random_params, zero_value
from tests.relax_passes.planted_redundancy import module as module_of

CPU = "llvm -mcpu=native"
ALL = ["CanonicalizeAttention", "PruneRedundantAttention"]


def module():
    """softmax(tanh(1 · q) kᵀ) v."""
    s = tirx.Var("s", "int64")

    def make(bb, q, k, v):
        q = bb.emit(R.multiply(q, relax.const(1.0)))
        scores = bb.emit(R.matmul(bb.emit(R.tanh(q)), bb.emit(R.permute_dims(k, [0, 1, 3, 2]))))
        return R.matmul(bb.emit(R.nn.softmax(scores)), v)

    return one_function(make, *[relax.TensorType((1, 2, s, 8), "float32")] * 3)


@pytest.mark.parametrize(
    ("attention", "ran", "changed"),
    [
        ("exact", ALL, {"neutral-operations"}),
        ({"views"}, ALL, set()),
        (set(), ALL, set()),
        ("off", [], set()),
    ],
)
def test_rules_are_chosen(attention, ran, changed):
    _, report = sits_tvm.lower(module(), CPU, config=Config(attention=attention))
    assert [run.name for run in report.passes if run.name in ALL] == ran
    assert {row.rule for row in report.attention_rewrites if row.changed} == changed
    assert len(report.attention) == len(ran) / 2


@pytest.mark.parametrize(
    ("attention", "row"),
    [("off", ("", "plain ops are asked for")), ((), ("attention", ""))],
)
def test_off_compiles_an_imported_op_as_plain_ops(attention, row):
    """PyTorch's functional attention is imported as the op: "off" is off for it, too."""

    class Attend(torch.nn.Module):
        def forward(self, q):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    mod, _ = sits_tvm.from_torch(Attend(), (q,))
    built = sits_tvm.build(mod, CPU, config=Config(attention=attention))
    (lowered,) = built.report.lowered_attention
    assert (lowered.kernel, lowered.reason) == row
    families = {kernel.family for kernel in built.report.kernels}
    assert ("Attention" in families) == bool(lowered.kernel)
    got = relax.VirtualMachine(built, tvm.cpu())["main"](q.numpy()).numpy()
    np.testing.assert_allclose(got, Attend()(q), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_verify_runs_what_the_passes_change():
    _, report = sits_tvm.lower(module(), CPU, config=Config(verify=True))
    assert {row.binding for row in report.rewrite_checks} == {"gv"}
    assert all(row.draws and row.difference <= row.limit for row in report.rewrite_checks)


def test_one_attention_has_one_name_in_all_tables():
    """Of the product that it replaces, where a view follows and where other names are taken."""

    class Two(torch.nn.Module):
        def forward(self, q):
            for _ in range(2):
                weights = torch.softmax(torch.bmm(q, q.mT) / 4, -1)
                q = torch.bmm(weights, q).cos()
            return q

    mod, _ = sits_tvm.from_torch(Two(), (torch.zeros(4, 5, 8),))
    _, report = sits_tvm.lower(mod, CPU, config=Config(verify=True))
    names = [row.binding for row in report.attention]
    bindings = mod["main"].body.blocks[0].bindings
    products = [b.var.name for b in bindings if getattr(b.value, "op", None) == MATMUL]
    assert names == products[1::2]
    assert [row.binding for row in report.lowered_attention] == names
    checks = [(row.pass_name, row.binding) for row in report.rewrite_checks]
    assert [name for pass_name, name in checks if pass_name == "CanonicalizeAttention"] == names
    assert len(set(checks)) == len(checks), checks


def test_verify_refuses_a_wrong_rewrite(monkeypatch):
    wrong = Rule("views", frozenset({"relax.tanh"}), lambda call, _: Outcome("", call.args[0]))
    monkeypatch.setattr(block, "RULES", (wrong,))
    with pytest.raises(SitsError, match="PruneRedundantAttention changed the value of"):
        sits_tvm.lower(module(), CPU, config=Config(verify=True))


def low_rank_module(rng):
    """A block whose query projection has rank 3, with its weights."""
    block = Block(hidden=48)
    params = random_params(block, rng)
    low_rank(block, params, "q", 3, rng)
    return module_of(block, params), params


def test_verify_refuses_wrong_factors(monkeypatch, rng):
    """Weights change with the module: each side is run with its own."""
    mod, params = low_rank_module(rng)

    def wrong(*args):
        found = low_rank_factors(*args)
        return found if isinstance(found, str) else replace(found, left=found.left * 1.001)

    monkeypatch.setattr(low_rank_rewrite, "low_rank_factors", wrong)
    with pytest.raises(SitsError, match="PruneRedundantHeads changed the value of"):
        sits_tvm.lower(mod, CPU, params=params, config=Config(verify=True))


@pytest.mark.slow
def test_verify_runs_pruned_heads(rng):
    mod, params = low_rank_module(rng)
    _, report = sits_tvm.lower(mod, CPU, params=params, config=Config(verify=True))
    assert any(row.rule == "low-rank" and row.changed for row in report.attention_rewrites)
    assert report.rewrite_checks
    assert all(row.draws and row.difference <= row.limit for row in report.rewrite_checks)


@pytest.mark.slow
@pytest.mark.parametrize("is_right", [True, False])
def test_verify_runs_folded_constants(is_right, monkeypatch, rng):
    block = Block()
    params = random_params(block, rng)
    zero_value(block, params, 1)
    mod, config = module_of(block, params), Config(verify=True)
    if is_right:
        _, report = sits_tvm.lower(mod, CPU, params=params, config=config)
        assert report.rewrite_checks
        assert all(row.draws and row.difference <= row.limit for row in report.rewrite_checks)
        return
    heads = sys.modules["relax_passes.prune_redundant_heads"]
    monkeypatch.setattr(heads, "folded_constant", lambda *_: None)
    with pytest.raises(SitsError, match="PruneRedundantHeads changed the value of"):
        sits_tvm.lower(mod, CPU, params=params, config=config)
