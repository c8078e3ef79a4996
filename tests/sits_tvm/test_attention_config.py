"""`Config.attention` and `Config.verify` in a build."""

import pytest
from small_modules import one_function
from tvm import relax, tirx
from tvm.relax import op as R

import sits_tvm
from relax_passes.prune_rules import block
from relax_passes.prune_rules.rule import Outcome, Rule
from sits_tvm import Config, SitsError

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


@pytest.mark.slow
def test_verify_runs_what_the_passes_change():
    _, report = sits_tvm.lower(module(), CPU, config=Config(verify=True))
    assert {row.binding for row in report.rewrite_checks} == {"gv"}
    assert all(row.draws and row.difference <= row.limit for row in report.rewrite_checks)


def test_verify_refuses_a_wrong_rewrite(monkeypatch):
    wrong = Rule("views", frozenset({"relax.tanh"}), lambda call, _: Outcome("", call.args[0]))
    monkeypatch.setattr(block, "RULES", (wrong,))
    with pytest.raises(SitsError, match="PruneRedundantAttention changed the value of"):
        sits_tvm.lower(module(), CPU, config=Config(verify=True))
