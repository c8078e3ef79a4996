"""Run nvcc: where it is, what it says, and which kernel it says it of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..diagnostics import Diagnostic, SitsError
from .cubin_cache import cache_key, read_cubin, write_cubin
from .launches import prim_func_of

REMEDY = "pip install 'sits_tvm[cuda]' brings NVIDIA's compiler and nvdisasm; no GPU is needed"

# As TVM compiles at load, so that what is counted here is what runs there. No `-split-compile`:
# ptxas then gives other registers to the same kernel.
PTXAS_OPTIONS = ("-v", "--register-usage-level=10", "--warn-on-local-memory-usage")
_OPTIONS = ("-cubin", "-O3", "--use_fast_math", "-Xptxas", ",".join(PTXAS_OPTIONS))
_QUIET = ("-diag-suppress", "177,1444")  # unused variables, longlong4: TVM's, harmless
KERNEL = re.compile(r"^extern \"C\" __global__ .*?(\w+)\([^()]*\) *\{ *$", re.MULTILINE)
"""The first line of a kernel in the CUDA text that TVM emits."""
_PTX_KERNEL = re.compile(r"\.entry (\w+)")


@dataclass(frozen=True)
class Toolkit:
    """NVIDIA's command-line tools; `nvdisasm` is None where it is missing."""

    nvcc: Path
    nvdisasm: Path | None


def find_toolkit() -> Toolkit | None:
    """The PyPI packages of this environment, else ``$CUDA_HOME``, ``$CUDA_PATH``, ``$PATH``."""
    nvcc = next((path for path in map(_executable, _folders("nvcc")) if path), None)
    if nvcc is None:
        return None
    nvdisasm = _executable(nvcc.parent / "nvdisasm")
    others = (path for path in map(_executable, _folders("nvdisasm")) if path)
    return Toolkit(nvcc, nvdisasm or next(others, None))


def compile_text(
    tools: Toolkit, arch: str, source: str, folder: Path, seconds: float | None = None
) -> tuple[Path, str]:
    """The cubin of a CUDA text, and the log of ptxas, for `read_log`; kept for the next time.

    Raises
    ------
    SitsError
        With every error, and the kernel that it is about.
    subprocess.TimeoutExpired
        If nvcc takes more than `seconds`.
    """
    text, cubin = folder / "kernels.cu", folder / "kernels.cubin"
    command = [str(tools.nvcc), f"-arch={arch}", *_QUIET]
    key = cache_key(version(tools.nvcc), *command, *_OPTIONS, source)
    kept = read_cubin(key)
    try:
        if kept is not None:
            cubin.write_bytes(kept[0])
            return cubin, kept[1]
        text.write_text(source)
    except OSError as error:
        message = f"cannot write what nvcc reads: {error}"
        help_ = "make room in the folder of temporary files, or let TMPDIR name another"
        found = Diagnostic.error("device-code-not-written", message, help=help_)
        raise SitsError([found]) from error
    done = _run([*command, *_OPTIONS, "-o", str(cubin), str(text)], seconds)
    if done.returncode == 0:
        write_cubin(key, cubin.read_bytes(), done.stderr)
        return cubin, done.stderr
    ptx = folder / "kernels.ptx"
    if "ptxas" in done.stderr:
        _run([*command, "-ptx", "-O3", "--use_fast_math", "-o", str(ptx), str(text)])
    raise SitsError(_problems(done.stderr, source, ptx.read_text() if ptx.exists() else ""))


def version(tool: Path) -> str:
    """What a tool says of itself."""
    return _run([str(tool), "--version"]).stdout


def _run(command: list[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


def _problems(log: str, source: str, ptx: str) -> list[Diagnostic]:
    """nvcc's errors, each with its line of the text and the kernel around it."""
    problems = []
    for line in log.splitlines():
        if not re.search(r"\b(error|fatal)\b", line) or re.search(
            r"errors? detected|aborted due to errors", line
        ):
            continue
        pattern, text, at = _place(line, source, ptx)
        named = re.search(r"Entry function.*'(\w+)'", line)
        kernel = named[1] if named else _last(pattern, text, at)
        shown = text.splitlines()[at - 1 : at]
        found = re.sub(r"^.*?(?=\berror|\bfatal)", "", line)
        about = f"kernel {kernel} does not compile" if kernel else "the kernels do not compile"
        function = prim_func_of(kernel) if kernel else ""
        problems.append(_invalid(f"{about}: {found}", function, "".join(shown).strip()))
    last = log.strip().splitlines()[-1:] or ["nvcc failed and said nothing"]
    return problems or [_invalid(last[0])]


def _invalid(message: str, function: str = "", line: str = "") -> Diagnostic:
    where = {"function": function, "ir": line}
    help_ = "sits_tvm.lower shows the PrimFunc it comes from"
    return Diagnostic.error("device-code-invalid", message, help=help_, **where)


def _place(line: str, source: str, ptx: str) -> tuple[re.Pattern[str], str, int]:
    """What an error is about: how kernels begin in a text, the text, and a line of it, from 1."""
    at = re.search(r"\.ptx, line (\d+)", line)
    if at:
        return _PTX_KERNEL, ptx, int(at[1])
    at = re.search(r"\.cu\((\d+)\)", line)
    return KERNEL, source, int(at[1]) if at else 0


def _last(pattern: re.Pattern[str], text: str, line: int) -> str:
    """The last match of `pattern` up to a line, counted from 1."""
    names = pattern.findall("\n".join(text.splitlines()[:line]) + "\n")
    return names[-1] if names else ""


def read_log(log: str) -> Iterator[tuple[str, int, int, int]]:
    """Name, registers, bytes spilled (stored and loaded), bytes of static shared memory."""
    for block in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", block)
        registers = re.search(r"Used (\d+) registers", block)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", block)
        shared = re.search(r"(\d+) bytes smem", block)
        if name and registers and spills:
            spilled = int(spills[1]) + int(spills[2])
            yield name[1], int(registers[1]), spilled, int(shared[1]) if shared else 0


def read_waits(log: str) -> Iterator[tuple[str, str]]:
    """Kernel and message of each place where ptxas makes products of `wgmma` wait on its own."""
    for line in log.splitlines():
        found = re.search(r"\(C75\d\d\) (.*wgmma.* in (?:the )?function '(\w+)'.*)", line)
        if found:
            yield found[2], found[1]


def _folders(tool: str) -> Iterator[Path]:
    for entry in sys.path:
        yield from sorted(Path(entry or ".").glob(f"nvidia/cu*/bin/{tool}"), reverse=True)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "bin" / tool
    found = shutil.which(tool)
    if found:
        yield Path(found)


def _executable(path: Path) -> Path | None:
    return path if path.is_file() and os.access(path, os.X_OK) else None
