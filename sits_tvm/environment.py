"""What this machine can do: the table that `python -m sits_tvm info` prints."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import tvm
from tvm.target import codegen

from ._target_cpu import cores
from .device_code.nvcc import REMEDY, find_toolkit
from .report_tables import render_table


@dataclass(frozen=True)
class Component:
    """A part that we use: the version found here ("" if it is missing) and what it is for.

    `remedy` says how to get it, for a part that is missing.
    """

    name: str
    found: str
    needed_for: str
    remedy: str = ""


def describe() -> list[Component]:
    """Everything that a build, an import or a run may need, found or not. Nothing is imported."""
    return [
        Component("TVM", str(tvm.__version__), "everything"),
        Component("LLVM", _llvm(), "CPU code, and the host code around CUDA kernels"),
        Component("CPU", _cpu(), "llvm -mcpu=native"),
        Component("C++ compiler", _compiler(), "saving executables, nvcc", "install g++"),
        _tool("nvcc", lambda tools: tools.nvcc, "compiling CUDA kernels, which TVM leaves as text"),
        _tool("nvdisasm", lambda tools: tools.nvdisasm, "instruction counts of CUDA kernels"),
        Component("NVIDIA driver", _driver(), "running CUDA code", "install NVIDIA's driver"),
        Component("GPU", _gpu(), "running CUDA code, bare cuda targets", "none in this machine"),
        _package("torch", "from_torch, from_pretrained", "hf"),
        _package("transformers", "from_pretrained", "hf"),
        _package("gguf", "from_pretrained with a GGUF file", "hf"),
        _package("onnx", "from_onnx", "onnx"),
        *(
            _package(name, "tune", "tune")
            for name in ("psutil", "cloudpickle", "xgboost", "tornado")
        ),
        _package("matplotlib", "plot of check_attention_redundancy", "tutorials"),
        replace(_package("PyYAML", "--config", ""), remedy="pip install pyyaml"),
    ]


def table() -> str:
    """`describe`, as text: what is missing comes with its remedy."""
    rows = [[row.name, row.found or f"missing: {row.remedy}", row.needed_for] for row in describe()]
    return render_table(["component", "found", "needed for"], rows)


def _llvm() -> str:
    return str(codegen.llvm_version_major()) if tvm.runtime.enabled("llvm") else ""


def cpu_name() -> str:
    """The CPU of this machine, as its maker calls it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else str(codegen.llvm_get_system_cpu())


def _cpu() -> str:
    return f"{codegen.llvm_get_system_cpu()}, {cores()} cores"


def _compiler() -> str:
    path = shutil.which("g++") or shutil.which("c++")
    return _version([path, "--version"]) if path else ""


def _tool(name: str, path_of: Callable[..., Path | None], needed_for: str) -> Component:
    tools = find_toolkit()
    path = path_of(tools) if tools else None
    found = f"{_version([str(path), '--version'])} ({path})" if path else ""
    return Component(name, found, needed_for, REMEDY)


def _version(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"V?(\d+\.\d+\.\d+)", done.stdout)
    return found[-1] if found else "does not run"


def _driver() -> str:
    """The CUDA version that the driver supports."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return "does not answer"
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _gpu() -> str:
    device = tvm.cuda(0)
    if not device.exist:
        return ""
    return f"{device.device_name}, compute capability {device.compute_version}"


def _package(name: str, needed_for: str, extra: str) -> Component:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = ""
    return Component(name, found, needed_for, f"pip install 'sits_tvm[{extra}]'")
