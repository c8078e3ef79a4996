"""Every spelling of attention becomes one `R.sits.attention`; its twin never another function.

`pytest -s` prints the table: spelling, op, what became of the twin.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from attention_imports import (
    Part,
    Together,
    by_from_torch,
    by_from_torch_dynamic,
    by_tvm,
    run,
    take,
)
from attention_meaning import NOTHING, Says, Spelling, band, definition, offset
from attention_spellings import SPELLINGS, TABLES
from tvm import IRModule, relax, tirx
from tvm.ir import Op

import sits_tvm
from relax_passes.canonicalize_attention import CanonicalizeAttention
from sits_tvm.report import Report

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
IMPORTS = {"from_torch": by_from_torch, "dynamic": by_from_torch_dynamic, "tvm": by_tvm}
# Numbers, and the imports by TVM, of these tables in the quick set.
NUMBERS, BY_TVM = ("plain", "grouped", "causal"), ("masked", "softmax")


def first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(a.double(), b.double(), tolerance, tolerance, equal_nan=True)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_means_what_the_table_says(spelling: Spelling):
    """Torch against the float64 definition of the op; the twin computes something else."""
    torch.manual_seed(0)
    inputs = spelling.inputs(*spelling.lengths)
    tolerance = TOLERANCE[inputs[0].dtype]
    want = spelling.result(definition(spelling.says, *spelling.operands(*inputs)))
    assert close(first(spelling.module()(*inputs)), want, tolerance)
    found = first(spelling.twin_module()(*inputs))
    assert not close(found, want, 2e-2)
    if spelling.twin.says is not None:
        operands = (spelling.twin.operands or spelling.operands)(*inputs)
        assert close(found, spelling.result(definition(spelling.twin.says, *operands)), tolerance)


def test_names_are_unique():
    assert len({s.name for s in SPELLINGS}) == len(SPELLINGS)


def test_count():
    """The 30 of Inductor's table and at least 25 of ours; a twin of each that is refused or not."""
    assert len([s for s in SPELLINGS if s.name[:2].isdigit()]) == 30
    assert len(SPELLINGS) >= 55
    assert all(s.twin.reason or s.twin.says for s in SPELLINGS)


# Recognition


@dataclass(frozen=True)
class Outcome:
    """What the pass made of one module: attention ops, and reasons of what it refused."""

    calls: list[relax.Call]
    reasons: list[str]


@functools.cache
def imported(table: str, how: str) -> tuple[Together, IRModule]:
    """With twins; dynamic dimensions without, as twins hold constants of one shape."""
    is_dynamic = how == "dynamic"
    rows = [s for s in TABLES[table] if s.dynamic or not is_dynamic]
    together = Together(rows, twins=not is_dynamic)
    return together, IMPORTS[how](together)


@functools.cache
def outcomes(table: str, how: str) -> list[tuple[Part, Outcome]]:
    together, mod = imported(table, how)
    return [(part, outcome(take(mod, part))) for part in together.parts]


def outcome(mod: IRModule) -> Outcome:
    report = Report()
    after = CanonicalizeAttention(report=report)(mod)
    assert relax.analysis.check_well_formed(after)
    calls: list[relax.Call] = []
    relax.analysis.post_order_visit(after["main"], lambda e: calls.append(e) if _is_op(e) else None)
    return Outcome(calls, [site.reason for site in report.attention if not site.recognised])


def _is_op(expr: relax.Expr) -> bool:
    return isinstance(expr, relax.Call) and expr.op == Op.get("relax.sits.attention")


def problems(says: Says, found: Outcome, dtype: torch.dtype) -> list[str]:
    """Where the one op differs from what it must say; constants are rounded to `dtype`."""
    if len(found.calls) != 1:
        return [f"{len(found.calls)} attention ops; {'; '.join(found.reasons) or NOTHING}"]
    (call,) = found.calls
    attrs, (q, k) = call.attrs, (list(x.ty.shape) for x in call.args[:2])
    lengths, heads = (q[2], k[2]), (int(q[1]), int(k[1]))
    bias = str(call.args[3].ty.dtype).rstrip("0123456789") if len(call.args) == 4 else None
    rounding = 4 * torch.finfo(dtype).eps
    right = {
        "scale": abs(attrs["scale"] / says.scale - 1) < rounding,
        "causal": _number(attrs["causal"], lengths) == _number(says.causal, lengths),
        "window": attrs["window"] == says.window,
        "softcap": abs(attrs["softcap"] - says.softcap) < rounding,
        "empty_row": attrs["empty_row"] == says.empty_row or _no_row_is_empty(says, lengths),
        "scores_dtype": attrs["scores_dtype"] in (says.scores_dtype, "float32"),
        "softmax_dtype": attrs["softmax_dtype"] == "float32",
    }
    wrong = [f"{n} {attrs[n]}, not {getattr(says, n, None)}" for n, ok in right.items() if not ok]
    if bias not in (says.bias.split("|") if says.bias else [None]):
        wrong.append(f"bias {bias}, not {says.bias}")
    if says.heads not in (None, heads):
        wrong.append(f"heads {heads}, not {says.heads}")
    return wrong


def _number(causal: int | str | None, lengths: tuple) -> int | str | None:
    """The offset, as a number where the lengths are."""
    return causal if _symbolic(lengths) else offset(causal, *map(int, lengths))


def _no_row_is_empty(says: Says, lengths: tuple) -> bool:
    """As the table says, or because the band alone hides keys and leaves one to each query."""
    if says.empty_row is None or says.bias is not None or _symbolic(lengths):
        return says.empty_row is None
    return bool(band(says, *map(int, lengths)).any(-1).all())


def _symbolic(lengths: tuple) -> bool:
    return not all(isinstance(n, tirx.IntImm) for n in lengths)


def verdict(part: Part, found: Outcome) -> str:
    """What is wrong; empty if the spelling or twin is as the table says."""
    spelling, twin = part.spelling, part.spelling.twin
    dtype = spelling.inputs(*spelling.lengths)[0].dtype
    if not part.is_twin:
        return "; ".join(problems(spelling.says, found, dtype))
    if found.calls:
        return "; ".join(problems(twin.says, found, dtype)) if twin.says else "recognised"
    reasons = found.reasons or [NOTHING]
    if twin.reason and any(reason.startswith(twin.reason) for reason in reasons):
        return ""
    return f"refused: {'; '.join(reasons)}, not {twin.reason or twin.says}"


def _import_cases():
    for how in IMPORTS:
        for table in TABLES:
            is_quick = how == "from_torch" or (how == "tvm" and table in BY_TVM)
            yield pytest.param(table, how, marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.parametrize(("table", "how"), _import_cases())
def test_recognised_and_twins_not(table: str, how: str):
    found = ((_name(part), verdict(part, outcome)) for part, outcome in outcomes(table, how))
    wrong = [f"{name}: {text}" for name, text in found if text]
    assert not wrong, "\n".join(wrong)


def _name(part: Part) -> str:
    return f"{part.spelling.name}{', twin' * part.is_twin}"


# Numbers


@pytest.mark.parametrize(
    "table",
    [
        t if t in ("plain", "causal", "grouped") else pytest.param(t, marks=pytest.mark.slow)
        for t in TABLES
    ],
)
@pytest.mark.parametrize("how", ["from_torch", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_same_numbers(table: str, how: str):
    """Spellings and twins, through the pass and the kernels, against torch."""
    together, mod = imported(table, how)
    after = CanonicalizeAttention()(mod)
    executable = sits_tvm.build(after, "llvm")
    for lengths in [(6, 7), (9, 11)] if how == "dynamic" else [None]:
        inputs = together.inputs(lengths)
        assert not differences(together, run(executable, inputs), inputs)


def differences(together: Together, found: list, inputs: tuple) -> dict[str, float]:
    """Outputs outside of the tolerance of their dtype, by spelling."""
    wrong = {}
    for part in together.parts:
        want = part.module(*inputs[part.inputs])
        want = want if isinstance(want, tuple) else (want,)
        for a, b in zip(found[part.outputs], want, strict=True):
            if not close(a, b, TOLERANCE[b.dtype]):
                error = float((a.double() - b.double()).abs().nan_to_num(math.inf).max())
                wrong[_name(part)] = error
    return wrong


def test_prints_the_table():
    rows = [row for table in TABLES for row in outcomes(table, "from_torch")]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    lines = [f"{a.spelling.name:42} {_shown(x):40} {_shown(y)}" for (a, x), (_, y) in pairs]
    print("", f"{'spelling':42} {'op':40} twin", *lines, sep="\n")
    assert len(lines) == len(SPELLINGS)


def _shown(found: Outcome) -> str:
    if not found.calls:
        return "; ".join(found.reasons) or NOTHING
    attrs = found.calls[0].attrs
    usual = {"causal": None, "window": 0, "softcap": 0.0, "scores_dtype": "float32"}
    said = [f"{n}={attrs[n]}" for n, value in usual.items() if attrs[n] != value]
    bias = [f"{x.ty.dtype} bias" for x in found.calls[0].args[3:]]
    return " ".join([f"scale={attrs['scale']:.4g}", *said, *bias])
