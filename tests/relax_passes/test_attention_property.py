"""Random graphs of attention have the same values before and after both attention passes."""

from __future__ import annotations

from collections.abc import Sequence

import attention_graphs as graphs
import pytest
import torch
from attention_graphs import Form
from attention_imports import run
from hypothesis import event, given, settings
from relax_interpreter import evaluate
from torch import Tensor

import relax_passes
import sits_tvm
from relax_passes.canonicalize_attention import CanonicalizeAttention
from sits_tvm.report import Report

TOLERANCE = {"float32": 2e-5, "float16": 2e-2}
SETTINGS = {"deadline": None, "derandomize": True, "database": None}


def lengths_of(form: Form) -> list[tuple[int, int]]:
    return [form.lengths, (4, 3), (2, 5)] if form.is_dynamic else [form.lengths]


def assert_close(found: Sequence[Tensor], want: Sequence[Tensor], tolerance: float):
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@settings(max_examples=60, **SETTINGS)
@given(graphs.forms())
def test_same_values(form: Form):
    """The op by its float64 definition, its lowering op by op, and the graph op by op."""
    before, report = graphs.module(form), Report()
    after = CanonicalizeAttention(report=report)(before)
    lowered = relax_passes.LowerAttention()(after)
    (site,) = report.attention
    event(f"{form.fault or 'no fault'}: {site.reason.split(':')[0] or 'recognised'}")
    assert site.recognised or form.fault or site.reason.startswith(EXCUSED), site.reason
    for lengths in lengths_of(form):
        inputs = graphs.draw_inputs(form, lengths)
        want = evaluate(before, inputs)
        for mod in (after, lowered):
            assert_close(evaluate(mod, inputs), want, TOLERANCE[form.dtype])


EXCUSED = ("mask-added-in-float16",)


@pytest.mark.slow
@settings(max_examples=25, **SETTINGS)
@given(graphs.forms())
def test_same_values_compiled(form: Form):
    after = CanonicalizeAttention()(graphs.module(form))
    executable = sits_tvm.build(after, "llvm")
    for lengths in lengths_of(form):
        inputs = graphs.draw_inputs(form, lengths)
        want = evaluate(graphs.module(form), inputs)
        assert_close(run(executable, inputs), want, TOLERANCE[form.dtype])
