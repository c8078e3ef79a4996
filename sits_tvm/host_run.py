"""Compiled modules as functions of NumPy arrays, on this CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import IRModule, relax

Run = Callable[[str, Sequence[Any]], Any]
"""(function name, arguments) -> array, or nested lists of arrays. Shapes are arguments too."""

Compile = Callable[[IRModule], Run]


class CompileOnce:
    """Compiles equal modules once, with `compile_`."""

    def __init__(self, compile_: Compile) -> None:
        self.compile, self.runs = compile_, dict[int, Run]()

    def __call__(self, mod: IRModule) -> Run:
        key = tvm_ffi.structural_hash(mod)
        if key not in self.runs:
            self.runs[key] = self.compile(mod)
        return self.runs[key]


def on_host(mod: IRModule, build: Callable[[IRModule], Any]) -> Run:
    """What `build` makes of a module, run on the CPU with NumPy arrays."""
    vm = relax.VirtualMachine(build(mod), tvm.cpu())

    def run(name: str, args: Sequence[Any]) -> Any:
        return _arrays(vm[name](*map(_argument, args)))

    return run


def _argument(value: Any) -> Any:
    is_shape = isinstance(value, tvm.runtime.ShapeTuple)
    return value if is_shape else tvm.runtime.tensor(np.array(value, order="C"))


def _arrays(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else [_arrays(part) for part in value]
