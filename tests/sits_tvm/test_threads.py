"""Builds in threads beside one another are what they are one after the other."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm
from small_builds import G32, run
from tvm import relax

import sits_tvm
from sits_tvm import Config, SitsError

CUDA = {"kind": "cuda", "arch": "sm_80"}
INT4 = Config(quant=G32)
# target, n, k, config, whether a weight is no number
JOBS = [
    ("llvm", 32, 64, INT4, False),
    (CUDA, 64, 128, INT4, False),
    ("llvm", 48, 64, INT4, True),
    ("llvm", 40, 96, Config(), False),
    (CUDA, 96, 64, INT4, True),
    ("llvm", 24, 128, INT4, False),
]


def module(n, k):
    bb, rows = relax.BlockBuilder(), tvm.tirx.Var("m", "int64")
    x = relax.Var("x", relax.TensorType([rows, k], "float16"))
    w = relax.Var(f"w{n}", relax.TensorType([k, n], "float16"))
    with bb.function("main", [x, w], attrs={"num_input": 1}):
        with bb.dataflow():
            y = bb.emit_output(relax.op.nn.softmax(bb.emit(relax.op.matmul(x, w))))
        bb.emit_func_output(y)
    return bb.get()


def built(job):
    """The report without times, CUDA text or results, cubins and parameters; or the error."""
    target, n, k, config, is_broken = job
    weight = np.random.default_rng(n).standard_normal((k, n)).astype("float16")
    if is_broken:
        weight[0, 0] = np.nan
    try:
        params = {f"w{n}": tvm.runtime.tensor(weight)}
        ex = sits_tvm.build(module(n, k), target, params=params, config=config)
    except SitsError as error:
        return str(error)
    report = re.sub(r'"seconds": [^,\s]*', "", ex.report.to_json())
    code = [m.inspect_source() for i in ex.mod.imports for m in i.imports if m.kind == "cuda"]
    if target == "llvm":  # whose text depends on addresses: of what may alias, and in which order
        x = np.random.default_rng(k).standard_normal((3, k)).astype("float16")
        code = [str(run(ex, tvm.runtime.tensor(x)).tolist())]
    return report, code, ex.cubins, {name: p.numpy().tobytes() for name, p in ex.params.items()}


@pytest.fixture(scope="module")
def alone():
    return [built(job) for job in JOBS]


def test_jobs_differ_and_some_fail(alone):
    failed = [made for made in alone if isinstance(made, str)]
    assert [re.findall(r"`w\d+`", text)[0] for text in failed] == ["`w48`", "`w96`"]
    made = [parts for parts in alone if not isinstance(parts, str)]
    names = [next(iter(params)).split(".")[0] for *_, params in made]
    assert names == ["w32", "w64", "w40", "w24"]
    assert [[len(text) > 100 for text in code] for _, code, *_ in made] == [[True]] * 4


def test_four_threads_make_what_one_makes(alone):
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(built, JOBS))
    for got, want in zip(together, alone, strict=True):
        assert got == want


def test_scopes_of_block_builders_are_of_their_thread():
    """A builder may leave its function while that of another thread is open."""
    bb, entered, left = relax.BlockBuilder(), threading.Event(), threading.Event()

    def other():
        inner = relax.BlockBuilder()
        with inner.function("main", []):
            entered.set()
            assert left.wait(20)
            assert relax.BlockBuilder.current() is inner
            inner.emit_func_output(relax.const(2))
        return inner.get()["main"]

    with ThreadPoolExecutor(1) as pool:
        with bb.function("main", []):
            made = pool.submit(other)
            assert entered.wait(20)
            bb.emit_func_output(relax.const(1))
        left.set()
        assert made.result() is not None
    assert relax.BlockBuilder.current() is None
