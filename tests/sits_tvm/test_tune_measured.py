"""`tune` as it measures: candidates built, checked and timed, here and over TVM's RPC tracker."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from small_builds import run
from small_modules import restored
from test_tune import INT8, QUANT, linear, tuned
from tvm.s_tir import meta_schedule as ms

import sits_tvm
from sits_tvm import Config, QuantSpec, parse_target
from sits_tvm.driver import unscheduled
from sits_tvm.tuning import measure
from sits_tvm.tuning.tasks import find_tasks

HOST = "llvm -mcpu=native"
FEW_CALLS = ms.runner.EvaluatorConfig(number=1, repeat=2, min_repeat_ms=0)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("config", [QUANT, INT8], ids=["float", "int8"])
def test_a_wrong_result_is_a_failure(config, rows):
    (task,) = find_tasks(*unscheduled(linear(rows), HOST, config=config))
    assert_finds_an_error(task)


def assert_finds_an_error(task):
    """The check takes a right kernel, and refuses one that errs in one element."""
    check = measure.check_of(task)
    candidate = task.search_space()
    kernel = measure.build_candidate(candidate.mod, task.target, None)
    infos = [info.as_json() for info in ms.arg_info.ArgInfo.from_entry_func(candidate.mod, True)]
    arguments = measure.allocate(check, tvm.cpu(), infos, 1)
    seconds = measure.evaluate(check, kernel, tvm.cpu(), FEW_CALLS, arguments)
    assert len(seconds) == 2
    wrong = check.expected.copy()
    wrong[(-1,) * wrong.ndim] += 2 * check.limit
    with pytest.raises(ValueError, match="wrong result: off by"):
        measure.evaluate(replace(check, expected=wrong), kernel, tvm.cpu(), FEW_CALLS, arguments)
    unit = ml_dtypes.finfo(infos[-1][1]).eps.astype("float64")
    assert check.limit < (1e-3 + unit) * np.abs(check.expected).max()


@pytest.mark.parametrize(
    ("stage", "message", "reason"),
    [
        ("build error", "LocalBuilder: Timeout, killed after 60 seconds", "timeout"),
        ("build error", "LocalBuilder: An exception occurred\nTVMError: no", "build error"),
        ("run error", "RPCRunner: An exception occurred\nwrong result: off by 3", "wrong result"),
        ("run error", "LocalRunner: An exception occurred\nSubprocess terminated", "run error"),
    ],
)
def test_failures_have_reasons(stage, message, reason):
    found, detail = measure._failure(stage, message)
    assert found == reason
    assert detail == message.splitlines()[-1]


def assert_right(work_dir, rng):
    """A build with the database is tuned and right."""
    config = Config(quant=QuantSpec(group_size=32), database=work_dir / "database")
    w = rng.standard_normal((96, 64)).astype("float32")
    built = sits_tvm.build(linear(1), HOST, params={"a1": w}, config=config)
    assert "tuned" in {kernel.ranked for kernel in built.report.kernels}
    x = rng.standard_normal((1, 64)).astype("float32")
    weight = restored(w, config.quant)
    np.testing.assert_allclose(run(built, x), x.astype("float64") @ weight.T, rtol=0, atol=1e-4)


def test_tunes_on_this_machine(tmp_path, rng):
    records, printed = tuned(tmp_path, linear(1), target=HOST, trials=2)
    record = records["1"]
    assert record.trials == 2
    assert 1e-7 < record.seconds <= record.default_seconds < 1e-2
    assert record.device == sits_tvm.environment.cpu_name()
    assert "2 trials" in printed[0]
    assert "failed:" not in printed[0]
    assert_right(tmp_path, rng)


@pytest.fixture
def tracker(monkeypatch):
    """A tracker and two servers on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = ["--host", "127.0.0.1"]
    commands = [
        ["tvm.exec.rpc_tracker", *at, "--port", str(port), "--port-end", str(port + 1)],
        *[["tvm.exec.rpc_server", *at, "--tracker", f"127.0.0.1:{port}", "--key", "two"]] * 2,
    ]
    started = []
    try:
        for command in commands:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command],
                    process_group=0,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        for name, value in (("HOST", "127.0.0.1"), ("PORT", str(port)), ("KEY", "two")):
            monkeypatch.setenv(f"TVM_TRACKER_{name}", value)
        yield wait_for_servers(2)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_servers(count):
    config = ms.runner.RPCConfig._normalized(None)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if config.count_num_servers() == count:
                return config
        except (ValueError, RuntimeError):
            pass  # the tracker is not up
        time.sleep(0.2)
    raise TimeoutError("no servers")


@pytest.mark.slow
def test_tunes_over_rpc(tracker, tmp_path, rng):
    records, printed = tuned(tmp_path, linear(1), target=HOST, trials=3, runner="rpc")
    record = records["1"]
    assert (record.trials, record.device) == (3, "two over RPC")
    assert 1e-7 < record.seconds <= record.default_seconds < 1e-2
    assert "failed:" not in printed[0]
    assert_right(tmp_path, rng)
    assert parse_target(HOST).kind.name == "llvm"


def test_candidates_run_on_all_cores_of_the_target(monkeypatch):
    """TVM by itself takes half of this machine's CPUs."""
    made = {}
    monkeypatch.setattr(ms.runner, "LocalRunner", lambda **options: made.update(options))
    measure.make_runner("local", None, os.cpu_count())
    code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))(); import tvm; "
    code += "print(tvm.get_global_func('runtime.NumThreads')())"
    arguments = [sys.executable, "-c", code, pickle.dumps(made["initializer"]).hex()]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(done.stdout) == os.cpu_count()


PINNED = """
import os, threading
from sits_tvm.tuning.measure import keep_off_workers
if not hasattr(os, "sched_getaffinity"):  # then there is nothing to do
    keep_off_workers()
    raise SystemExit
first, *others = sorted(os.sched_getaffinity(0))
stop = threading.Event()
def work():
    os.sched_setaffinity(0, {first})
    stop.wait()
threading.Thread(target=work).start()
while not any(os.sched_getaffinity(int(t)) == {first} for t in os.listdir("/proc/self/task")):
    pass
keep_off_workers()
assert os.sched_getaffinity(0) == set(others or {first})
stop.set()
"""


def test_the_calling_thread_has_a_core_of_its_own():
    subprocess.run([sys.executable, "-c", PINNED], check=True, timeout=60)
