"""The gate refuses every wrong rule at every loss scale, and passes the right one."""

from __future__ import annotations

import re

import pytest
from gradient_rules import rule
from quantize_mutants import MUTANTS, NAME, RIGHT, Kernel, Mutant, gradient, model
from tvm import IRModule

from sits_tvm import differentiate
from sits_tvm.gradient_check._instrument import instrument
from sits_tvm.gradient_check.gate import LOSS_SCALES, run_gate
from sits_tvm.gradient_check.result import GradientRow
from sits_tvm.pipeline import run_on_host
from sits_tvm.report_tables import render_table

OURS = Mutant("rule of the op")


def function_name(mutant: Mutant) -> str:
    return re.sub(r"\W+", "_", mutant.name)


def differentiated(mutant: Mutant) -> IRModule:
    mod = model(function_name(mutant))
    if mutant is OURS:
        return differentiate(mod, function_name(mutant))
    with rule(NAME, gradient(mutant)):
        return differentiate(mod, function_name(mutant))


@pytest.fixture(scope="module")
def rows() -> dict[str, list[GradientRow]]:
    """Rows of the gate for each rule; all are compiled together."""
    mods = {mutant: differentiated(mutant) for mutant in (OURS, RIGHT, *MUTANTS)}
    functions = {}
    for mutant, mod in mods.items():
        tested = instrument(mod, function_name(mutant), None).mod
        for gvar, func in tested.functions.items():
            functions[gvar] = Kernel(tested, mutant).visit_expr(func) if mutant.forward else func
    run = run_on_host(IRModule(functions))
    return {
        mutant.name: run_gate(
            mod, function_name(mutant), lambda _: run,
            given={}, seeds=(0,), loss_scales=LOSS_SCALES,
        )[0]
        for mutant, mod in mods.items()
    }  # fmt: skip


def gradients(rows: list[GradientRow], loss_scale: float) -> list[GradientRow]:
    return [r for r in rows if r.loss_scale == loss_scale and not r.operator.startswith("value")]


def test_passes_the_rule_of_the_op_and_its_composition(rows):
    for name in (OURS.name, RIGHT.name):
        assert {row.status for row in rows[name]} == {"pass"}


@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fails_a_wrong_rule(rows, mutant, loss_scale):
    assert "fail" in {row.status for row in gradients(rows[mutant.name], loss_scale)}


def test_table(rows):
    header = ["rule", *(f"relL2 ×{scale:g}" for scale in LOSS_SCALES), "cosine", "zeros", "gate"]
    lines = []
    for name, found in rows.items():
        worst = [max(r.relative_l2 for r in gradients(found, s)) for s in LOSS_SCALES]
        cosine = min(r.cosine for r in gradients(found, 1.0))
        zeros = sum(r.zero_mismatches for r in gradients(found, 1.0))
        verdict = "fail" if any(r.status == "fail" for r in found) else "pass"
        lines.append([name, *(f"{w:.1e}" for w in worst), f"{cosine:.4f}", str(zeros), verdict])
    print(f"\n{render_table(header, lines)}")
    assert [line[-1] for line in lines] == ["pass"] * 2 + ["fail"] * len(MUTANTS)
