"""`tune`, with measurements that the tests make up: budgets, resuming, what is kept and refused."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tvm_ffi
from small_modules import Mlp, one_function
from tvm import relax, tirx

import sits_tvm
from sits_tvm import Config, QuantSpec, SitsError, parse_target, tune
from sits_tvm.__main__ import main
from sits_tvm.tuning import measure, run
from sits_tvm.tuning.search import Search, values_of
from sits_tvm.tuning.trials import Trial, TrialLog
from tir_schedules.records.database import arch_of, read_records

CPU = "llvm -mcpu=znver4 -num-cores=2"
QUANT = Config(quant=QuantSpec(group_size=32))
INT8 = Config(quant=QuantSpec(group_size=32, activation="int8"))


def linear(rows, n=96, k=64):
    types = relax.TensorType((rows, k), "float32"), relax.TensorType((n, k), "float32")
    return one_function(
        lambda bb, x, w: bb.emit(relax.op.matmul(x, relax.op.permute_dims(w))), *types, num_input=1
    )


@pytest.fixture
def measured(monkeypatch):
    """The parameters that were measured, in order; set `.cost` to a function of them."""

    class Measured(list):
        cost = staticmethod(lambda values: 1.0 + sum(values.values()))

    made = Measured()

    def take(schedules, target, builder, runner, rounds=1):
        found = []
        for values in map(values_of, schedules):
            outcome = made.cost(values)
            found.append(
                Trial(values, outcome)
                if isinstance(outcome, float)
                else Trial(values, None, *outcome)
            )
            if rounds == 1:
                made.append(values)
        return found

    for name in ("make_builder", "make_runner", "check_of"):
        monkeypatch.setattr(measure, name, lambda *_: None)
    monkeypatch.setattr(measure, "measure", take)
    return made


def tuned(work_dir, mod=None, target=CPU, **options):
    """(records by bucket, what was printed)."""
    printed = []
    options = {"config": QUANT, "progress": printed.append, "trials": 10, **options}
    database = tune(mod or linear(9), target, work_dir=work_dir, **options)
    records = read_records(database, arch_of(parse_target(target)))
    return {rows: record for (_, rows), record in records.items()}, printed


def test_the_search_finds_the_best_with_few_trials(measured, tmp_path):
    """One of 360 candidates, each different; the default comes first."""
    best = {"rows": 2, "vectors": 2, "words": 1, "panel": 12}
    measured.cost = lambda v: 1.0 + sum(abs(v[name] / best[name] - 1) for name in best)
    records, printed = tuned(tmp_path, linear(64, n=256), trials=64, config=INT8)
    record = records["33+"]
    assert record.seconds <= 1.05
    assert measured[0] == {"rows": 4, "vectors": 2, "words": 4, "panel": 4}
    assert len(measured) == record.trials == 64
    assert len({tuple(values.values()) for values in measured}) == 64
    assert record.default_seconds == measured.cost(measured[0])
    assert "64 trials, best 10" in printed[-2]
    assert "gain" in printed[-1]


def test_a_build_uses_the_database(measured, tmp_path):
    measured.cost = lambda values: float(abs(values["rows"] - 4) + 1)
    tuned(tmp_path)
    config = Config(quant=QuantSpec(group_size=32), database=tmp_path / "database")
    _, report = sits_tvm.lower(linear(9), CPU, config=config)
    (kernel,) = [k for k in report.kernels if k.family == "Matmul"]
    assert (kernel.ranked, kernel.tuned_rows) == ("tuned", ("9+",))
    _, report = sits_tvm.lower(linear(9), CPU, config=QUANT)
    assert "tuned" not in {k.ranked for k in report.kernels}


def test_says_that_there_is_no_room_for_a_trial(measured, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    measured.cost = lambda values: 1.0
    with monkeypatch.context() as patch:
        patch.setattr(TrialLog, "add", full)
        with pytest.raises(SitsError, match=r"work-dir.*No space left on device"):
            tuned(tmp_path, trials=1)
    assert tuned(tmp_path, trials=1)[0]  # there is again


def test_goes_on_where_it_stopped(measured, tmp_path):
    tuned(tmp_path, trials=6)
    before = list(measured)
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"key": {"arch": "znv')  # killed while it wrote
    records, _ = tuned(tmp_path, trials=16)
    assert measured[:6] == before
    assert len(measured) == records["9+"].trials == 16
    assert len({tuple(values.values()) for values in measured}) == 16
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["trial"]["parameters"] for line in lines] == measured
    tuned(tmp_path, trials=16)
    assert len(measured) == 16


def test_every_range_of_rows_is_a_task_and_a_small_space_ends(measured, tmp_path):
    mod = linear(tirx.Var("s", "int64"))
    records, _ = tuned(tmp_path, mod)
    assert {rows: r.trials for rows, r in records.items()} == {"1": 6, "2-8": 10, "9+": 10}
    records, _ = tuned(tmp_path / "int8", mod, config=INT8)
    assert records.keys() == {"1", "2-32", "33+"}
    assert {r.workload.family for r in records.values()} == {"int8_matmul"}


def test_no_candidate_that_was_drawn_is_lost(monkeypatch):
    """MetaSchedule draws 16 at once; a batch takes five of them."""
    search = Search.__new__(Search)
    drawn = iter([[SimpleNamespace(sch=i) for i in range(16)]])
    search._context = SimpleNamespace(
        generate_measure_candidates=lambda: next(drawn, None),
        notify_runner_results=lambda candidates, results: None,
    )
    search._waiting, seen = [], set()
    monkeypatch.setattr(search, "see", lambda i: not (i in seen or seen.add(i)), raising=False)
    batches = [search.draw(5) for _ in range(5)]
    assert list(map(len, batches)) == [5, 5, 5, 1, 0]
    assert [i for batch in batches for i in batch] == list(range(16))


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


@pytest.mark.parametrize("call", [interrupt, tvm_ffi.convert(interrupt)], ids=["python", "tvm"])
def test_an_interrupt_keeps_what_was_measured(measured, tmp_path, call):
    """Also one that arrives in a call by TVM, which makes a RuntimeError of it."""

    def cost(values):
        if len(measured) == 8:
            call()
        return 1.0

    measured.cost = cost
    records, printed = tuned(tmp_path, trials=64)
    assert records["9+"].trials == 8
    assert any("stopped" in line for line in printed)


def test_the_time_budget_ends_the_search(measured, tmp_path, monkeypatch):
    """On a clock that each candidate takes half a second of."""
    clock = [0.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def cost(values):
        clock[0] += 0.5
        return 1.0

    measured.cost = cost
    records, _ = tuned(tmp_path, trials=10**6, time_budget=4.0)
    assert 8 <= records["9+"].trials < 168
    with pytest.raises(SitsError, match="nothing was measured before the end of the time budget"):
        tuned(tmp_path / "other", time_budget=0.0)


def test_failures_are_counted_by_reason(measured, tmp_path):
    def cost(values):
        if values["rows"] == 12 and values["vectors"] == 2:
            return 1.0
        return ("wrong result", "off by 3") if values["vectors"] > 2 else ("timeout", "killed")

    measured.cost = cost
    records, printed = tuned(tmp_path, trials=20)
    assert records["9+"].parameters["rows"] == 12
    assert "timeout" in printed[-1]
    assert "wrong result" in printed[-1]


def test_no_valid_candidate_is_an_error_with_the_reason(measured, tmp_path):
    measured.cost = lambda values: ("build error", "LLVM said no")
    with pytest.raises(SitsError) as raised:
        tuned(tmp_path)
    (error,) = raised.value.diagnostics
    assert error.code == "no-valid-candidate"
    assert "int4_matmul 96x64" in error.message
    assert "10 build error" in error.message
    assert "LLVM said no" in error.message


def refusal(*args, **options):
    with pytest.raises(SitsError) as raised:
        tune(*args, **options)
    return raised.value.diagnostics[0]


def test_refuses(measured, tmp_path, monkeypatch):
    for name in ("HOST", "PORT", "KEY"):
        monkeypatch.delenv(f"TVM_TRACKER_{name}", raising=False)
    good = {"config": QUANT, "work_dir": tmp_path}
    assert refusal(linear(9), CPU, **good, runner="remote").code == "runner"
    assert refusal(linear(9), CPU, **good, trials=0).code == "trials"
    assert refusal(linear(9), CPU, **good, trials="64").code == "trials"
    assert "TVM_TRACKER_HOST" in refusal(linear(9), CPU, **good, runner="rpc").message
    assert refusal(linear(9), CPU, work_dir=tmp_path).code == "nothing-to-tune"
    assert refusal(linear(9), CPU, config=QUANT, work_dir="/proc/tuned").code == "work-dir"
    (tmp_path / "trials.jsonl").write_text('{"key": {}}\n{}\n')
    found = refusal(linear(9), CPU, **good)
    assert (found.code, "line 1" in found.message) == ("trials-damaged", True)


def test_cli(measured, tmp_path, capsys):
    import tvm

    (tmp_path / "mlp.json").write_text(tvm.ir.save_json(Mlp))
    arguments = ["tune", str(tmp_path / "mlp.json"), "--int4", "--target", CPU, "--trials", "3"]
    assert main([*arguments, "--work-dir", str(tmp_path / "out"), "--json", "--quiet"]) == 0
    database = Path(json.loads(capsys.readouterr().out)["database"])
    assert len(read_records(database, "znver4")) == 6


KILLED = """
import os, sys
from sits_tvm.tuning import measure
from sits_tvm.tuning.search import values_of
from sits_tvm.tuning.trials import Trial
import test_tune

def take(schedules, *_, **__):
    print("batch", flush=True)
    if take.batches == 2:
        os.kill(os.getpid(), 9)
    take.batches += 1
    return [Trial(values_of(s), 1.0) for s in schedules]

take.batches = 0
for name in ("make_builder", "make_runner", "check_of"):
    setattr(measure, name, lambda *_: None)
measure.measure = take
test_tune.tuned(sys.argv[1], trials=64)
"""


def test_survives_being_killed(measured, tmp_path):
    """By SIGKILL in the third batch: the trials of two are there, and a database of them."""
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(read_records(tmp_path / "database", "znver4")) == 1
    records, _ = tuned(tmp_path, trials=20)
    assert len(measured) == 4
    assert records["9+"].trials == 20


def test_targets_share_no_trials(measured, tmp_path):
    tuned(tmp_path)
    tune(linear(9), "llvm -mcpu=haswell", config=QUANT, trials=4, work_dir=tmp_path, progress=print)
    assert len(measured) == 14
    assert len(read_records(tmp_path / "database", "haswell")) == 1
    assert len(read_records(tmp_path / "database", "znver4")) == 1
    assert parse_target(CPU).attrs["mcpu"] == "znver4"
