"""Compile the CUDA text in an executable and read back what it became.

A TVM build on a machine without an NVIDIA driver compiles no device code: the executable holds
source, which is compiled when it is loaded, so that it built proves nothing. Here nvcc compiles
the same text with the flags that TVM uses at load, and nvdisasm shows the instructions.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tvm import relax
from tvm.runtime import Module
from tvm.target import Target

from ..diagnostics import Diagnostic, SitsError, emit
from ..report import Kernel, Report
from . import sass, sass_loops
from .cubin_cache import Counts, cache_key, read_counts, write_counts
from .launches import Launch, check_launches, prim_func_of
from .nvcc import REMEDY, Toolkit, compile_text, find_toolkit, read_log, read_waits, version


@dataclass(frozen=True)
class DeviceCode:
    """The machine code of an executable: a cubin per CUDA module, and what its kernels are."""

    cubins: list[bytes] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


def check_device_code(
    executable: relax.VMExecutable,
    target: Target,
    report: Report,
    launches: Mapping[str, Launch] | None = None,
) -> list[bytes]:
    """Compile what `executable` holds for CUDA and fill `report.kernels` with what came out.

    Parameters
    ----------
    executable : relax.VMExecutable
    target : Target
        Its ``arch`` is what the code is compiled for.
    report : Report
        An entry of `kernels` that names a PrimFunc is replaced by the kernels it was split into.
    launches : mapping of str to Launch, optional
        From `record_launches`.

    Returns
    -------
    list of bytes
        A cubin per CUDA module.

    Raises
    ------
    SitsError
        As `compile_device_code`, and as `check_launches`.
    """
    arch = str(target.attrs["arch"])
    check_launches(dict(launches or {}), arch)
    code = compile_device_code(executable, arch, launches)
    report.kernels = _merge(report.kernels, code.kernels)
    return code.cubins


def compile_device_code(
    executable: relax.VMExecutable,
    arch: str,
    launches: Mapping[str, Launch] | None = None,
) -> DeviceCode:
    """Compile every CUDA module of `executable` for `arch` ("sm_90") and describe its kernels.

    Raises
    ------
    SitsError
        Without nvcc; or with every message of nvcc and the kernel that it is about.
    """
    tools = require_toolkit()
    if tools.nvdisasm is None:
        message = "nvdisasm was not found: no instruction counts"
        emit(Diagnostic.warning("sass-not-read", message, help=REMEDY))
    code = DeviceCode()
    for source in cuda_sources(executable):
        with tempfile.TemporaryDirectory() as folder:
            cubin, log = compile_text(tools, arch, source, Path(folder))
            for kernel, message in read_waits(log):
                where = {"function": prim_func_of(kernel)}
                emit(Diagnostic.warning("wgmma-serialized", f"{kernel}: {message}", **where))
            code.cubins.append(cubin.read_bytes())
            code.kernels.extend(_kernels(tools, cubin, log, launches or {}))
    return code


def require_toolkit() -> Toolkit:
    """The compiler that CUDA builds need; raises SitsError with the remedy if there is none."""
    tools = find_toolkit()
    if tools is None:
        message = "nvcc was not found, and CUDA code that nothing has compiled proves nothing"
        raise SitsError([Diagnostic.error("nvcc-missing", message, help=REMEDY)])
    return tools


def cuda_sources(executable: relax.VMExecutable) -> list[str]:
    """The text of every CUDA module in `executable`."""
    return [module.inspect_source() for module in _modules(executable.mod) if module.kind == "cuda"]


def _modules(module: Module) -> Iterator[Module]:
    yield module
    for imported in module.imports:
        yield from _modules(imported)


def _kernels(
    tools: Toolkit, cubin: Path, log: str, launches: Mapping[str, Launch]
) -> Iterator[Kernel]:
    counts = _counts(tools.nvdisasm, cubin) if tools.nvdisasm else {}
    for name, registers, spills, shared in read_log(log):
        kernel = _described(name, launches)
        sass, loop_sass = counts.get(name, ({}, {}))
        yield replace(
            kernel,
            registers=registers,
            spills=spills,
            static_smem=shared,
            sass=sass,
            loop_sass=loop_sass,
        )


def _counts(nvdisasm: Path, cubin: Path) -> Counts:
    """Of every kernel of a cubin; kept for as long as the code that counts is the same."""
    code = map(inspect.getsource, (sass, sass_loops))
    key = cache_key(version(nvdisasm), *code, cubin.read_bytes().hex())
    counts = read_counts(key)
    if counts is None:
        counts = {
            name: [_count(lines), _count(sass_loops.main_loop(lines))]
            for name, lines in sass.disassemble(nvdisasm, cubin).items()
        }
        write_counts(key, counts)
    return counts


def _count(lines: Sequence[sass.Instruction]) -> dict[str, int]:
    return sass.count(lines) if lines else {}


def _described(name: str, launches: Mapping[str, Launch]) -> Kernel:
    launch = launches.get(name)
    if launch is None:
        return Kernel(name, "", "")
    return Kernel(
        name,
        "",
        "",
        grid=launch.grid,
        block=launch.block,
        static_smem=launch.static_smem,
        dynamic_smem=launch.dynamic_smem,
        condition=launch.condition,
    )


def _merge(prim_funcs: list[Kernel], kernels: list[Kernel]) -> list[Kernel]:
    known = {entry.name: entry for entry in prim_funcs}
    merged = []
    for kernel in kernels:
        entry = known.get(prim_func_of(kernel.name))
        if entry is not None:
            kernel = replace(
                kernel,
                family=entry.family,
                ranked=entry.ranked,
                tuned_rows=entry.tuned_rows,
                tuned_by=entry.tuned_by,
                reason=entry.reason,
            )
        merged.append(kernel)
    split = {prim_func_of(kernel.name) for kernel in kernels}
    return [*merged, *(entry for entry in prim_funcs if entry.name not in split)]
