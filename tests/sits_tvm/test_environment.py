from importlib import metadata

import tvm
from tvm.target import codegen

from sits_tvm import environment
from sits_tvm.device_code import nvcc
from sits_tvm.environment import describe, table


def found():
    return {row.name: row.found for row in describe()}


def test_names_what_is_here():
    rows = found()
    assert rows["TVM"] == tvm.__version__
    assert rows["torch"] == metadata.version("torch")
    assert codegen.llvm_get_system_cpu() in rows["CPU"]
    assert (rows["GPU"] != "") == tvm.cuda(0).exist


def test_names_what_is_missing_and_the_remedy(monkeypatch):
    monkeypatch.setattr(environment, "find_toolkit", lambda: None)
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    rows = {row.name: row for row in describe()}
    for name in ("nvcc", "nvdisasm", "C++ compiler"):
        assert rows[name].found == ""
        assert rows[name].remedy
    assert "missing: pip install 'sits_tvm[cuda]'" in table()


def test_toolkit_is_found_by_environment_variable_and_path(monkeypatch, tmp_path):
    monkeypatch.setattr(nvcc.sys, "path", [])
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvcc.find_toolkit() is None
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvcc.find_toolkit() == nvcc.Toolkit(tool, None)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tool.parent))
    assert nvcc.find_toolkit() == nvcc.Toolkit(tool, None)
