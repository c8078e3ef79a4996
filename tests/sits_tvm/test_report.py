"""The report survives JSON and shows everything it holds as text and HTML."""

from sits_tvm.diagnostics import Diagnostic
from sits_tvm.report import (
    AttentionRewrite,
    AttentionSite,
    Kernel,
    PassRun,
    QuantizedWeight,
    QuantizeSite,
    Report,
    RewriteCheck,
    SkippedWeight,
)
from sits_tvm.report_tables import WIDTH, render_table


def full_report() -> Report:
    return Report(
        target="llvm",
        quantized=[QuantizedWeight("main", "lv1", "q.weight", "int4 g32", (64, 32), 8192, 1184)],
        skipped=[SkippedWeight("main", "lv2", "<lm_head>", "head: set Config.quantize_head")],
        attention=[AttentionSite("main", "lv3", True, "no mask", {"scale": 0.5, "window": 0})],
        attention_rewrites=[AttentionRewrite("main", "lv3", "views", False, "no view")],
        rewrite_checks=[RewriteCheck("main", "lv3", 9, 1e-7, 1e-6, "seed 0", "", "Fuse")],
        quantize_sites=[QuantizeSite("main", "lv4", "divide, round", False, "range: not clipped")],
        passes=[PassRun("LegalizeOps", True, 0.25)],
        kernels=[Kernel("k", "Matmul", "default", ("8", "m"), ("128",), 32, 0, 0, 0, {"FFMA": 4})],
        diagnostics=[Diagnostic.warning("odd", "something odd")],
    )


def test_json_round_trip():
    report = full_report()
    assert Report.from_json(report.to_json()) == report


def test_text_shows_every_row():
    text = str(full_report())
    for word in (
        "q.weight",
        "1,184",
        "<lm_head>",
        "scale=0.5",
        "0 rewritten, 1 left",
        "1 of 1 equal up to rounding",
        "Fuse",
        "range: not clipped",
        "LegalizeOps",
        "8xm",
        "FFMA=4",
        "odd",
    ):
        assert word in text


def test_tuned_ranges_of_rows_are_a_list():
    """No shape, as grid and block are."""
    tuned = {"tuned_rows": ("1", "2-8", "257+"), "tuned_by": ("measured", "static")}
    text = str(Report(kernels=[Kernel("k", "Matmul", "tuned", ("8", "m"), **tuned)]))
    assert "8xm   1, 2-8, 257+  measured, static" in text


def test_html_escapes():
    page = full_report()._repr_html_()
    assert "&lt;lm_head&gt;" in page
    assert "<lm_head>" not in page


def test_empty_report_is_empty():
    assert str(Report()) == ""


def test_table_pads_columns():
    assert render_table(["a", "bb"], [["ccc", "d"]]) == "a    bb\n---  --\nccc  d"


def test_wide_cells_are_wrapped():
    """No word is lost, and what is narrow stays as it is."""
    words = [f"w{n}" for n in range(200)]
    lines = render_table(["name", "reason"], [["x", " ".join(words)], ["y", ""]]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[2].startswith("x     w0 w1 ")
    assert lines[-1] == "y"
    assert " ".join(line[6:].strip() for line in lines[2:-1]).split() == words


def test_the_usual_attributes_of_attention_are_not_printed():
    assert "window" not in str(full_report())
    odd = AttentionSite("main", "lv", True, "", {"scale": 1 / 3, "window": 4})
    assert "scale=0.333333 window=4" in str(Report(attention=[odd]))


def test_repr_is_short():
    assert repr(Report()) == "<Report: empty>"
    assert repr(full_report()).startswith(
        "<Report: 1 quantized, 1 skipped, 1 attention, 1 attention_rewrites"
    )


def test_columns_without_a_value_are_left_out():
    report = Report(kernels=[Kernel("k", "Matmul", "default")])
    assert "registers" not in str(report)
    assert "registers" in str(full_report())


def test_notes_stay_out_of_the_printed_report():
    """The tables say the same; a warning is said nowhere else."""
    report = Report(diagnostics=[Diagnostic.note("quiet", "a"), Diagnostic.warning("loud", "b")])
    for shown in (str(report), report._repr_html_()):
        assert "quiet" not in shown
        assert "loud" in shown
