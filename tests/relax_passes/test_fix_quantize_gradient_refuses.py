"""FixQuantizeGradient leaves other functions than affine quantization alone, and says why."""

import numpy as np
import pytest
from quantize_forms import SCALE, X, one_function
from refused_quantize_spellings import REFUSED, codes_of, floor_of_a_half_more, truncated
from tvm import relax

from relax_passes.fix_quantize_gradient import FixQuantizeGradient
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report


@pytest.mark.parametrize(
    ("spell", "parameters", "code", "severity"), REFUSED, ids=[r[0].__name__ for r in REFUSED]
)
def test_says_why(spell, parameters, code, severity):
    """The module stays the same object; one finding and one row name binding and condition."""
    before, report = one_function(spell, X, *parameters), Report()
    with collect() as found:
        assert FixQuantizeGradient(report=report)(before).same_as(before)
    assert [(d.code, d.severity, d.function) for d in found] == [(code, severity, "main")]
    (row,) = report.quantize_sites
    assert not row.fixed
    assert row.reason.startswith(f"{code}: ")
    assert row.binding == found[0].binding
    assert found[0].binding in {b.var.name for b in before["main"].body.blocks[0].bindings}
    assert found[0].help


def differs(a, b):
    return int((a != b).sum())


def test_the_refused_roundings_do_differ():
    """What each refusal claims, in NumPy's float32: they are other functions."""
    f = np.float32
    s = f(0.3)
    ties = ((np.arange(-8, 7) + f(0.5)) * s).astype(f)
    assert differs(np.rint(ties / s), np.rint(ties * (f(1) / s)))
    halves = np.arange(-8, 7) + f(0.5)
    assert differs(np.rint(halves), np.floor(halves + f(0.5)))
    assert np.floor(np.nextafter(f(0.5), f(0)) + f(0.5)) == 1
    assert differs(np.rint(halves) + 3, np.rint(halves + f(3)))
    just_below = np.nextafter(f(1.5), f(0))
    assert np.rint(just_below + f(2)) == 4 != np.rint(just_below) + 2  # an even zero point too
    q, z = np.arange(16, dtype=f), f(3)
    assert differs((q - z) * s, q * s - z * s)
    x = np.linspace(-4, 4, 4001, dtype="float16")
    quotient = x / np.float16(0.3)
    assert differs(np.rint(quotient.astype(f)), np.rint(x.astype(f) / f(np.float16(0.3))))


def test_a_note_says_that_the_ops_keep_their_gradients():
    with collect() as found:
        FixQuantizeGradient()(one_function(floor_of_a_half_more, X, SCALE))
        FixQuantizeGradient()(one_function(truncated, X, SCALE))
    assert "straight-through gradients" in found[0].message
    assert "is lost" in found[1].message
    assert "R.round" in found[1].help


def test_every_site_has_a_row():
    """Two in one function, one of them refused."""

    def spell(b, x, s):
        good = b.multiply(codes_of(b, x, s), s)
        return b.multiply(codes_of(b, good, s, -5, 6), s)

    report = Report()
    func = FixQuantizeGradient(report=report)(one_function(spell, X, SCALE))["main"]
    assert [site.fixed for site in report.quantize_sites] == [True, False]
    assert isinstance(func.body.blocks[0].bindings[0].value, relax.Call)
    assert "quantization: 1 of 2 with its gradient" in str(report)
