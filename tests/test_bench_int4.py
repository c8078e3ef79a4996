"""The INT4 benchmark on small shapes: it compares results, and its figures are complete."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from sits_tvm.config import QuantSpec
from tests.benchmarks import bench_int4, bench_int4_variants
from tests.benchmarks.int4_case import Case, NotMeasured
from tests.benchmarks.int4_plot import plot

CASE = Case(8, 64, 64, QuantSpec(group_size=32), layers=2, threads=2)


@pytest.mark.slow
def test_every_kernel_has_its_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_int4, "cases", lambda: iter([CASE]))
    file = tmp_path / "rows.json"
    bench_int4.main(["--rounds", "2", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert {"cpu", "threads", "apache-tvm", "onnxruntime", "torch"} <= figures["machine"].keys()
    rows = {row["kernel"]: row for row in figures["rows"]}
    assert rows.keys() >= {"read", "fma", *bench_int4.OURS, *bench_int4.PEERS}
    peers = {peer for peer in bench_int4.PEERS if "skipped" not in rows[peer]}
    assert peers >= {"ort level 0", "ort level 4", "torch fp32", "torch bf16", "TVM default"}
    numbers = {"us", "least us", "GB/s", "GFLOP/s", "of read", "error", *(f"x {p}" for p in peers)}
    for name in bench_int4.OURS:
        assert rows[name].keys() >= numbers
        assert all(rows[name][key] > 0 for key in numbers), rows[name]
        assert 0 <= rows[name]["others"] <= 1
    assert rows["W4A16"]["of peak"] > 0


def test_plots_a_kernel_that_some_cases_skip(tmp_path):
    rows = [
        {"case": "a", "m": 1, "kernel": "x", "us": 1, "GFLOP/s": 2, "of read": 0.5},
        {"case": "a", "m": 1, "kernel": "read", "GB/s": 9},
        {"case": "b", "m": 1, "kernel": "x", "skipped": "why"},
        {"case": "b", "m": 512, "kernel": "y", "us": 1, "GFLOP/s": 2},
    ]
    plot(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size


def test_a_wrong_result_is_not_timed(monkeypatch):
    """Not even one that is wrong in one element of one row."""

    def wrong(case):
        kernel = bench_int4.w4a16(case)
        factor = np.ones((case.m, case.n))
        factor[0, 5] = 1.5
        return replace(kernel, result=lambda: kernel.result() * factor)

    monkeypatch.setattr(bench_int4, "alternate", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(SystemExit, match="M=8 K=64 N=64 g32, W4A16: relative error"):
        bench_int4.measure(CASE, {"W4A16": wrong}, 1)


def test_every_form_has_its_cost(monkeypatch):
    for name, value in {"WIDTH": 64, "TAIL": 45}.items():
        monkeypatch.setattr(bench_int4_variants, name, value)
    monkeypatch.setattr(bench_int4, "ROTATED", 1)
    rows = bench_int4_variants.measure("W4A16", 1, 2)
    assert [row["form"] for row in rows] == ["base", "symbolic rows", "asymmetric", "K=N=45"]
    assert rows[0]["cost"] == 1
    assert all(row["us"] > 0 and row["cost"] > 0 for row in rows)


def test_says_why_a_peer_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(NotMeasured, match="llama-cpp-python is not installed"):
        bench_int4.PEERS["llama.cpp Q4_0"](CASE)


def test_only_takes_names_with_all_words():
    ((case, ours),) = bench_int4.chosen(["W4A16", "M=1", "N=14336", "g128"])
    assert (case.m, case.n, case.spec.group_size, list(ours)) == (1, 14336, 128, ["W4A16"])
    assert not list(bench_int4.chosen(["W4"]))
    assert np.prod([case.layers, case.n, case.k]) // 2 > 96 << 20


@pytest.mark.parametrize("factor", [1.25, -1])
def test_models_are_compared_before_they_are_timed(monkeypatch, factor):
    from tests.benchmarks import bench_int4_model as bench

    ids = np.arange(1, 513)[None]
    ours = {"INT4": (lambda ids: factor * ids[:, -1:].astype("float32"), 10)}
    peers = {bench.TORCH: (lambda ids: ids[:, -1:].astype("float32"), 40)}
    if factor < 0:
        with pytest.raises(SystemExit, match=r"INT4: logits off by 2\.00"):
            bench.measure(ours, peers, ids, 1)
        return
    row, _ = bench.measure(ours, peers, ids, 2)
    assert row["error"] == 0.25
    for task in ("prefill", "decode"):
        assert row[f"{task} tokens/s"] > 0
        assert row[f"{task} x {bench.TORCH}"] > 0
