"""Read how kernels are launched while TVM lowers them; the built library no longer says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import tvm
import tvm_ffi
from tvm import DataType, tirx
from tvm.ir import Call, Op
from tvm.ir.instrument import pass_instrument
from tvm.sym import Analyzer

from .._pass_context import with_instruments
from .._target_gpu import STATIC_SHARED_MEMORY, shared_memory_limit
from ..diagnostics import Diagnostic, raise_errors

_THREADS = 1024
_DYNAMIC = "tirx.use_dyn_shared_memory"


@dataclass(frozen=True)
class Launch:
    """How the host starts a kernel.

    `grid` and `block` are extents along x, y, z, as text since they may be symbolic ("n // 4").
    Shared memory is in bytes per block; the dynamic one may be symbolic too. `arguments` are those
    of the kernel in order: names of buffers, and integers as text. `condition` is what the host
    asks last before it starts the kernel, "" if nothing: of a product, its rows ("m <= 16").
    """

    grid: tuple[str, ...]
    block: tuple[str, ...]
    static_smem: int
    dynamic_smem: int | str
    arguments: tuple[str, ...] = ()
    condition: str = ""


@contextmanager
def record_launches() -> Iterator[dict[str, Launch]]:
    """Collect the launch of every kernel that is lowered inside the block, by kernel name.

    It is a pass context with an instrument: other instruments of the current context still run.
    """
    recorder = _Recorder()
    with with_instruments(recorder):
        yield recorder.launches


def check_launches(launches: dict[str, Launch], arch: str) -> None:
    """Refuse kernels that `arch` cannot start.

    Raises
    ------
    SitsError
        Naming every kernel with more than 49152 bytes of static shared memory, more dynamic
        shared memory than `arch` has, or more than 1024 threads.
    """
    dynamic = shared_memory_limit(arch)
    problems = []
    for name, launch in launches.items():
        if launch.static_smem > STATIC_SHARED_MEMORY:
            problems.append(
                _beyond(
                    name,
                    f"{launch.static_smem} bytes of static shared memory",
                    STATIC_SHARED_MEMORY,
                )
            )
        if isinstance(launch.dynamic_smem, int) and launch.dynamic_smem > dynamic:
            problems.append(
                _beyond(
                    name, f"{launch.dynamic_smem} bytes of shared memory", f"{dynamic} of {arch}"
                )
            )
        threads = _elements(launch.block) if all(map(str.isdigit, launch.block)) else 0
        if threads > _THREADS:
            problems.append(_beyond(name, f"{threads} threads per block", _THREADS))
    raise_errors(problems)


def _beyond(kernel: str, found: str, limit: object) -> Diagnostic:
    help = "use smaller tiles"
    if "static" in found:
        help += ', or scope "shared.dyn", which has more'
    message = f"kernel {kernel} takes {found}, more than the {limit} there are"
    return Diagnostic.error(
        "kernel-launch-limit", message, function=prim_func_of(kernel), help=help
    )


def prim_func_of(kernel: str) -> str:
    """The PrimFunc that a kernel was split from."""
    return re.sub(r"_kernel(_\d+)?$", "", kernel)


def _elements(extents: Sequence[str]) -> int:
    return math.prod(map(int, extents))


@pass_instrument
class _Recorder:
    def __init__(self) -> None:
        self.launches: dict[str, Launch] = {}

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if info.name != "tirx.SplitHostDevice":
            return
        functions = {gv.name_hint: f for gv, f in mod.functions.items()}
        for func in functions.values():
            if isinstance(func, tirx.PrimFunc):
                shared, conditions = _shared_terms(func), _conditions(func)
                for call in _kernel_calls(func.body):
                    name = str(call.args[0].value)
                    launch = _launch(call, functions[name], shared)
                    condition = conditions.get(name)
                    text = "" if condition is None else _text(_written_out(condition, shared))
                    self.launches[name] = replace(launch, condition=text)


def _conditions(func: tirx.PrimFunc) -> dict[str, tirx.Expr]:
    """By kernel, the innermost condition under which it starts."""
    found: dict[str, tirx.Expr] = {}

    def note(branch: tirx.IfThenElse) -> None:
        otherwise = Analyzer().simplify(tirx.Not(branch.condition))
        cases = (branch.then_case, branch.condition), (branch.else_case, otherwise)
        for case, condition in cases:
            for call in _kernel_calls(case) if case is not None else []:
                found.setdefault(str(call.args[0].value), condition)

    tvm_ffi.structural_walk(func.body, (tirx.IfThenElse, note), order="post")
    return found


def _kernel_calls(body: tirx.Stmt) -> list[Call]:
    calls: list[Call] = []

    def note(call: Call) -> None:
        if isinstance(call.op, Op) and call.op.name == "tirx.call_ffi_kernel":
            calls.append(call)

    tvm_ffi.structural_walk(body, (Call, note))
    return calls


def _shared_terms(func: tirx.PrimFunc) -> dict[tirx.Var, tirx.Expr]:
    """What the variables stand for by which TVM names terms that occur more than once."""
    values: dict[tirx.Var, tirx.Expr] = {}

    def note(bind: tirx.Bind) -> None:
        if str(bind.var.name).startswith("cse_v"):
            values[bind.var] = _written_out(bind.value, values)

    tvm_ffi.structural_walk(func.body, (tirx.Bind, note))
    return values


def _written_out(expr: tirx.Expr, values: dict[tirx.Var, tirx.Expr]) -> tirx.Expr:
    def value(var: tirx.Var) -> tirx.Expr:
        return values.get(var, var)

    return tvm_ffi.structural_map(expr, (tirx.Var, value), order="post")


def _launch(call: Call, kernel: tirx.PrimFunc, shared: dict[tirx.Var, tirx.Expr]) -> Launch:
    names = [str(name) for name in kernel.attrs["tirx.kernel_launch_params"]]
    values = [_written_out(x, shared) for x in call.args[len(call.args) - len(names) :]]
    extents = dict(zip(names, values, strict=True))
    dynamic = extents.get(_DYNAMIC, 0)
    return Launch(
        grid=_axes(extents, "blockIdx"),
        block=_axes(extents, "threadIdx"),
        static_smem=_static_shared_memory(kernel),
        dynamic_smem=int(_text(dynamic)) if _text(dynamic).isdigit() else _text(dynamic),
        arguments=tuple(
            _text(_written_out(x, shared)).removesuffix(".data")
            for x in call.args[1 : len(call.args) - len(names)]
        ),
    )


def _axes(extents: dict[str, Any], prefix: str) -> tuple[str, ...]:
    sizes = [_text(extents.get(f"{prefix}.{axis}", 1)) for axis in "xyz"]
    while len(sizes) > 1 and sizes[-1] == "1":
        sizes.pop()
    return tuple(sizes)


def _text(expr: Any) -> str:
    """`(n + T.int64(127)) // T.int64(128)` without the types and `T.`."""
    return re.sub(r"\bT\.(?=\w+\()", "", re.sub(r"T\.u?int\d+\((-?\d+)\)", r"\1", str(expr)))


def _static_shared_memory(kernel: tirx.PrimFunc) -> int:
    sizes: list[int] = []

    def note(alloc: tirx.AllocBuffer) -> None:
        buffer = alloc.buffer
        if buffer.scope() == "shared":
            elements = _elements([_text(extent) for extent in buffer.ty.shape])
            sizes.append(elements * DataType(str(buffer.ty.dtype)).itemsize)

    tvm_ffi.structural_walk(kernel.body, (tirx.AllocBuffer, note))
    return sum(sizes)
