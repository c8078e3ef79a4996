"""`tune` by the static model, with estimates that the tests make up: what is kept and refused."""

import json
import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from cuda_sources import needs_nvcc
from small_modules import one_function
from test_tune import refusal
from tvm import relax, tirx

import sits_tvm
from sits_tvm import Config, QuantSpec, SitsError, tune
from sits_tvm.driver import unscheduled
from sits_tvm.tuning import run, static_run, static_search
from sits_tvm.tuning.static_constants import H200, MODEL_VERSION
from sits_tvm.tuning.static_search import StaticSearch
from sits_tvm.tuning.tasks import find_tasks
from sits_tvm.tuning.trials import Trial
from tir_schedules.records.database import read_records

GPU = "cuda -arch=sm_90"
QUANT = Config(quant=QuantSpec())
DEFAULT = {"channels": 1, "tokens": 1, "warps_n": 1, "warps_m": 1, "warps_k": 2, "units": 4,
           "stages": 4, "split": 2, "wgmma": 0}  # fmt: skip
pytestmark = needs_nvcc


def linear(rows, n=1024, k=4096, dtype="float16"):
    types = relax.TensorType((rows, k), dtype), relax.TensorType((n, k), dtype)
    return one_function(
        lambda bb, x, w: bb.emit(relax.op.matmul(x, relax.op.permute_dims(w))), *types, num_input=1
    )


@pytest.fixture
def estimated(monkeypatch):
    """The parameters that were compiled, in order; set `.cost` to a function of them, which is not
    called twice at a time."""

    class Estimated(list):
        cost = staticmethod(lambda values: 1.0)

    made, lock = Estimated(), threading.Lock()

    def judge(candidate, *_):
        with lock:
            outcome = made.cost(candidate.values)
        return (
            Trial(candidate.values, outcome)
            if isinstance(outcome, float)
            else Trial(candidate.values, None, *outcome)
        )

    def lowered(task, values, work):
        made.append(values)
        return SimpleNamespace(values=values)

    monkeypatch.setattr(static_run, "lower_candidate", lowered)
    monkeypatch.setattr(static_run, "judge", judge)
    return made


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    monkeypatch.setattr(static_search, "_DRAWN", 300)


def tuned(work_dir, mod=None, target=GPU, **options):
    """(records by bucket, what was printed)."""
    printed = []
    options = {"config": QUANT, "progress": printed.append, "trials": 10, **options}
    database = tune(mod or linear(1), target, work_dir=work_dir, runner="static", **options)
    records = read_records(database, target.rpartition("=")[2])
    return {rows: record for (_, rows), record in records.items()}, printed


def test_keeps_the_best_with_what_it_is_an_estimate_of(estimated, tmp_path):
    estimated.cost = lambda values: 1.0 + 0.2 * (values["stages"] != 6)
    records, _ = tuned(tmp_path, trials=40)
    record = records["1"]
    assert estimated[0] == DEFAULT
    assert record.parameters["stages"] == 6
    assert (record.seconds, record.default_seconds) == (1.0, 1.2)
    assert (record.ranked, record.device, record.cores) == ("static", "H200", 132)
    assert (record.model, record.trials) == (MODEL_VERSION, len(estimated))
    assert len(record.to_json("sm_90")) < 1024


@pytest.mark.parametrize(("others", "ties", "kept"), [(0.92, 9, True), (0.9, 8, False)])
def test_the_default_wins_a_tie(estimated, tmp_path, others, ties, kept):
    """Estimates that differ by less than a tenth are in no order; the others are equal."""
    estimated.cost = lambda values: 1.0 if values == DEFAULT else others
    records, printed = tuned(tmp_path)
    assert (records["1"].parameters == DEFAULT) == kept
    assert (records["1"].ties, records["1"].trials) == (ties, 10)
    assert "ties" in printed[-1]


def test_the_same_parameters_come_out_again(estimated, tmp_path):
    estimated.cost = lambda values: 1.0 + hash(tuple(values.values())) % 100
    first = tuned(tmp_path / "first")[0]["1"], list(estimated)
    estimated.clear()
    assert (tuned(tmp_path / "second")[0]["1"], list(estimated)) == first


def test_goes_on_with_no_trials_of_other_kernels(estimated, tmp_path, monkeypatch):
    tuned(tmp_path, trials=6)
    before = list(estimated)
    monkeypatch.setattr("sits_tvm.tuning.tasks.digest", lambda module: f"other {module}")
    estimated.cost = lambda values: 2.0
    records, _ = tuned(tmp_path, trials=6)
    assert estimated == [*before, *before]
    assert (records["1"].trials, records["1"].seconds) == (6, 2.0)
    keys = [json.loads(line)["key"] for line in (tmp_path / "trials.jsonl").open()]
    assert keys[-1]["kernels"] == "other tir_schedules.matmul_cuda.rule"


def test_goes_on_where_it_stopped_and_not_with_another_model(estimated, tmp_path, monkeypatch):
    tuned(tmp_path, trials=6)
    before = list(estimated)
    records, _ = tuned(tmp_path, trials=12)
    assert estimated[:6] == before
    assert len(estimated) == records["1"].trials == 12
    assert len({tuple(values.values()) for values in estimated}) == 12
    tuned(tmp_path, trials=12)
    assert len(estimated) == 12
    monkeypatch.setattr("sits_tvm.tuning.static_constants.MODEL_VERSION", MODEL_VERSION + 1)
    tuned(tmp_path, trials=4)
    assert estimated[12:] == before[:4]


def test_a_record_that_is_gone_is_written_again(estimated, tmp_path):
    """From the trials, none of which is estimated anew."""
    before = tuned(tmp_path, trials=6)[0]
    shutil.rmtree(tmp_path / "database")
    assert tuned(tmp_path, trials=6)[0] == before
    assert len(estimated) == 6


def with_trial(folder, key, **changes):
    """A work_dir with one trial of the default, changed."""
    trial = {"parameters": DEFAULT, "seconds": 1.0, "failure": "", "detail": "", **changes}
    folder.mkdir()
    (folder / "trials.jsonl").write_text(json.dumps({"key": key, "trial": trial}) + "\n")
    return folder


@pytest.fixture
def key(estimated, tmp_path):
    tuned(tmp_path / "key", trials=1)
    estimated.clear()
    return json.loads((tmp_path / "key" / "trials.jsonl").read_text())["key"]


@pytest.mark.parametrize("change", [{"units": 3}, {"other": 1}, {"units": None}])
def test_trials_that_the_space_no_longer_has_do_not_count(estimated, tmp_path, key, change):
    parameters = {name: v for name, v in {**DEFAULT, **change}.items() if v is not None}
    records, _ = tuned(with_trial(tmp_path / "old", key, parameters=parameters), trials=2)
    assert records["1"].trials == len(estimated) == 2


@pytest.mark.parametrize(
    "change", [{"seconds": "1"}, {"seconds": float("nan")}, {"parameters": [1]}, {"failure": 3}]
)
def test_damaged_trials_are_refused(tmp_path, key, change):
    work_dir = with_trial(tmp_path / "damaged", key, **change)
    found = refusal(linear(1), GPU, config=QUANT, work_dir=work_dir, runner="static")
    assert (found.code, "line 1" in found.message) == ("trials-damaged", True)


def test_a_file_in_place_of_the_database_is_refused(estimated, tmp_path):
    (tmp_path / "database").touch()
    found = refusal(linear(1), GPU, config=QUANT, work_dir=tmp_path, runner="static")
    assert found.code == "work-dir"
    assert not estimated


def test_ends_where_no_other_candidate_can_be_better(estimated, tmp_path):
    """A call takes a microsecond at least; the default almost gets there."""
    estimated.cost = lambda values: 1.05e-6
    records, _ = tuned(tmp_path)
    assert estimated == [DEFAULT]
    assert records["1"].trials == 1


def test_rejections_are_counted_by_reason(estimated, tmp_path):
    def cost(values):
        return 1.0 if values == DEFAULT else ("spilled", f"{values['units']} bytes are spilled")

    estimated.cost = cost
    records, printed = tuned(tmp_path)
    assert records["1"].parameters == DEFAULT
    assert "9 spilled" in printed[-1]
    estimated.cost = lambda values: ("spilled", "8 bytes are spilled")
    with pytest.raises(SitsError) as raised:
        tuned(tmp_path / "none")
    (error,) = raised.value.diagnostics
    assert error.code == "no-valid-candidate"
    assert "none of 10 candidates is valid: 10 spilled" in error.message
    assert "8 bytes are spilled" in error.message


def test_an_interrupt_keeps_what_was_estimated(estimated, tmp_path, monkeypatch):
    lower = static_run.lower_candidate

    def interrupting(*args):
        if len(estimated) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return lower(*args)

    monkeypatch.setattr(static_run, "lower_candidate", interrupting)
    records, printed = tuned(tmp_path, trials=64)
    assert records["1"].trials == 5
    assert any("stopped" in line for line in printed)


def test_the_time_budget_ends_the_search(estimated, tmp_path, monkeypatch):
    """On a clock that each candidate takes half a second of."""
    clock = [0.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def cost(values):
        clock[0] += 0.5
        return 1.0

    estimated.cost = cost
    records, _ = tuned(tmp_path, trials=10**6, time_budget=4.0)
    assert 4 <= records["1"].trials < 100
    with pytest.raises(SitsError, match="before the end of the time budget"):
        tuned(tmp_path / "other", time_budget=0.0)


def test_a_build_uses_the_records(estimated, tmp_path):
    estimated.cost = lambda values: 1.0 + (values == DEFAULT)
    tuned(tmp_path, trials=3)
    config = Config(quant=QuantSpec(), database=tmp_path / "database")
    _, report = sits_tvm.lower(linear(1), GPU, config=config)
    (kernel,) = [k for k in report.kernels if k.family == "TensorCoreMatmul"]
    assert (kernel.ranked, kernel.tuned_rows) == ("tuned", ("1",))
    assert kernel.tuned_by == ("static",)


def test_every_range_of_rows_is_a_task():
    lowered, target = unscheduled(linear(tirx.Var("s", "int64")), GPU, config=QUANT)
    tasks = find_tasks(lowered, target)
    assert [(task.bucket, task.space.rows) for task in tasks] == [
        ("1", 1), ("2-8", 8), ("9-16", 16), ("17-32", 32), ("33-64", 64), ("65-256", 256),
        ("257+", 1024),
    ]  # fmt: skip


def test_what_has_no_kernel_is_not_compiled():
    (task,) = find_tasks(*unscheduled(linear(8), GPU, config=QUANT))
    search = StaticSearch(task, H200)
    drawn = search.draw([], 10_000)
    assert 2 < len(drawn) < static_search._DRAWN
    assert all(not isinstance(search.work(values), str) for values in drawn)
    assert any("multiple of the group size" in reason for reason in search.refused)
    assert any("shared memory" in reason for reason in search.refused)
    assert "a block has 16 tokens, more than there are" in search.refused


def test_refuses(estimated, tmp_path, monkeypatch):
    good = {"config": QUANT, "work_dir": tmp_path}
    found = refusal(linear(1), "llvm -mcpu=znver4", **good, runner="static")
    assert (found.code, "none for llvm" in found.message) == ("runner", True)
    found = refusal(linear(1), "cuda -arch=sm_89", **good, runner="static")
    assert (found.code, "no static model of 'sm_89'" in found.message) == ("no-static-model", True)
    monkeypatch.setattr("sits_tvm.device_code.check.find_toolkit", lambda: None)
    assert refusal(linear(1), GPU, **good, runner="static").code == "nvcc-missing"


def test_refuses_to_measure_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("tvm.device", lambda kind: SimpleNamespace(exist=False))
    found = refusal(linear(1), GPU, config=QUANT, work_dir=tmp_path)
    assert found.code == "no-gpu"
    assert 'runner="static"' in found.help


def test_compiles_and_estimates(tmp_path):
    """As it is: two candidates of one row."""
    records, printed = tuned(tmp_path, linear(1, n=256, k=512), trials=2)
    record = records["1"]
    assert 1e-6 < record.seconds <= record.default_seconds < 3e-6
    assert "failed:" not in printed[0]
    (line, *_) = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert json.loads(line)["key"]["device"] == f"H200, static model {MODEL_VERSION}"
