"""Machine code is made once for a CUDA text, an architecture and a compiler."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda_sources import needs_nvcc

from sits_tvm.device_code import check, nvcc
from sits_tvm.device_code import cubin_cache as cache
from sits_tvm.diagnostics import SitsError

KERNEL = 'extern "C" __global__ void add_kernel(int* x) {\n  x[0] += 1;\n}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SITS_TVM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@needs_nvcc
def test_nvcc_runs_once_for_a_text(folder, tmp_path, monkeypatch):
    tools, commands, run = nvcc.find_toolkit(), [], nvcc._run

    def noted(command, *limits):
        commands.append(command)
        return run(command, *limits)

    def compile_(source, arch="sm_90"):
        cubin, log = nvcc.compile_text(tools, arch, source, tmp_path)
        return cubin.read_bytes(), list(nvcc.read_log(log))

    monkeypatch.setattr(nvcc, "_run", noted)
    first = compile_(KERNEL)
    compilations = [c for c in commands if "-cubin" in c]
    assert compile_(KERNEL) == first
    assert [c for c in commands if "-cubin" in c] == compilations
    assert compile_(KERNEL, "sm_80")[0] != first[0]
    assert compile_(KERNEL.replace("+= 1", "+= 2"))[0] != first[0]
    assert len(files(folder)) == 3


@needs_nvcc
def test_errors_are_not_kept(folder, tmp_path):
    tools = nvcc.find_toolkit()
    for _ in range(2):
        with pytest.raises(SitsError, match="add_kernel does not compile"):
            nvcc.compile_text(tools, "sm_90", KERNEL.replace("x[0]", "y[0]"), tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize("fault", ["", "{}", '{"cubin": 3, "log": ""}', "changed"])
def test_what_cannot_be_read_is_not_there(folder, fault):
    cache.write_cubin("key", b"code", "log")
    path = folder / "key.json"
    if fault == "changed":
        fault = json.dumps({**json.loads(path.read_text()), "cubin": "AAAA"})
    path.write_text(fault)
    assert cache.read_cubin("key") is None
    cache.write_cubin("key", b"code", "log")
    assert cache.read_cubin("key") == (b"code", "log")


def test_many_writers_leave_one_whole_file(folder):
    codes = [bytes([i]) * 100_000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda code: cache.write_cubin("key", code, "log"), codes))
    assert files(folder) == ["key.json"]
    assert cache.read_cubin("key")[0] in codes


def test_the_oldest_are_deleted(folder, monkeypatch):
    monkeypatch.setattr(cache, "_MOST_FILES", 3)
    for i in range(5):
        cache.write_cubin(f"key{i}", b"code", "")
        if i < 4:
            os.utime(folder / f"key{i}.json", (i, i))
    assert files(folder) == ["key2.json", "key3.json", "key4.json"]


def test_off_or_not_writable(monkeypatch, tmp_path):
    monkeypatch.setenv("SITS_TVM_CACHE", "")
    cache.write_cubin("key", b"code", "log")
    assert cache.read_cubin("key") is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SITS_TVM_CACHE", str(tmp_path / "file"))
    cache.write_cubin("key", b"code", "log")
    assert cache.read_cubin("key") is None


COUNTS = {"main_kernel": [{"total": 9}, {"total": 4}]}


def test_counts_that_are_not_those_that_were_written_are_none(folder):
    cache.write_counts("key", COUNTS)
    assert cache.read_counts("key") == COUNTS
    path = folder / "key.json"
    path.write_text(path.read_text().replace("9", "8"))
    assert cache.read_counts("key") is None


def test_every_cubin_has_counts_of_its_own(folder, tmp_path, monkeypatch):
    def disassemble(_, cubin):
        return {cubin.read_text(): []}

    monkeypatch.setattr(check, "version", lambda tool: "nvdisasm")
    monkeypatch.setattr(check.sass, "disassemble", disassemble)
    for name in ("first", "second", "first"):
        cubin = tmp_path / "kernels.cubin"
        cubin.write_text(name)
        assert check._counts(tmp_path, cubin) == {name: [{}, {}]}
