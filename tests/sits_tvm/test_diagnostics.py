"""Diagnostics render with place and remedy, and are gathered or logged."""

import logging

import pytest
from tvm.ir import IRModule
from tvm.ir.transform import module_pass

from sits_tvm.diagnostics import Diagnostic, SitsError, collect, emit, raise_errors

FOUND = Diagnostic.error(
    "gradient-truncated",
    "the gradient of `w` passes through an int8 cast",
    function="main",
    binding="lv1",
    ir='R.astype(w, dtype="int8")',
    help="use fake_quantize",
)


def test_renders_in_full():
    assert str(FOUND) == (
        "error[gradient-truncated]: the gradient of `w` passes through an int8 cast\n"
        "  in function main, at `lv1`\n"
        '      R.astype(w, dtype="int8")\n'
        "help: use fake_quantize"
    )


def test_error_carries_all_of_them():
    note = Diagnostic.note("skipped", "left alone")
    with pytest.raises(SitsError) as raised:
        raise_errors([FOUND, note, FOUND])
    assert raised.value.diagnostics == [FOUND, FOUND]
    assert str(raised.value).count("gradient-truncated") == 2


def test_notes_and_warnings_do_not_raise():
    raise_errors([Diagnostic.note("a", "b"), Diagnostic.warning("c", "d")])


def test_collects_from_inside_a_tvm_pass():
    @module_pass(opt_level=0)
    def speak(mod, _ctx):
        emit(FOUND)
        return mod

    with collect() as found:
        speak(IRModule({}))
    assert found == [FOUND]


def test_inner_collect_keeps_its_own():
    with collect() as outer:
        with collect() as inner:
            emit(FOUND)
        emit(FOUND)
    assert len(outer) == len(inner) == 1


def test_logs_where_nothing_collects(caplog):
    with caplog.at_level(logging.INFO, logger="sits_tvm"):
        emit(FOUND)
    assert "gradient-truncated" in caplog.text
