"""Our kernels for the product with a 4-bit weight, and TVM's for the same PrimFunc."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import tvm
from tvm import tirx

from sits_tvm import parse_target
from tests.benchmarks.int4_case import Case, Kernel, NotMeasured
from tir_schedules import RULES, ApplyRecords, scheduling_passes
from tir_schedules.int4_format.packed_layout import PackedLayout
from tir_schedules.int4_format.packing import interleave, pack_nibbles
from tir_schedules.matmul.int4_matmul import int4_matmul
from tir_schedules.matmul.int8_matmul import int8_matmul, quantize_activation

THREADS = int(os.environ.setdefault("TVM_NUM_THREADS", "2"))
TARGET = parse_target(f"llvm -mcpu=native -num-cores={THREADS}")
LANES, ORDER = 16, "vectors"
"""Of packed weights on the CPU."""
SLOW = 2e9
"""FLOP above which TVM's default lowering takes seconds."""


def w4a16(case: Case, rows: int | None = None) -> Kernel:
    """`rows` None: one kernel for any number of them."""
    func = int4_matmul(rows, case.n, case.k, case.spec, "float32", ORDER)
    return tvm_kernel(case, compiled(func), "float32", "fma")


def w4_bfloat16(case: Case, rows: int | None = None) -> Kernel:
    """Activations are float32 and rounded in the call."""
    spec = replace(case.spec, activation="bfloat16")
    func = int4_matmul(rows, case.n, case.k, spec, "float32", ORDER)
    return tvm_kernel(case, compiled(func), "bfloat16", "vdpbf16ps")


def w4a8(case: Case, rows: int | None = None) -> Kernel:
    """Activations are quantized anew for every layer."""
    layout = PackedLayout(case.n, case.k, case.spec, ORDER)
    func = quantize_activation(rows, case.k, layout.group_size, "float32")
    quantize = compiled(func)
    product = compiled(int8_matmul(rows, layout, "float32"))
    _, *outputs = func.params
    x_parts = [
        tvm.runtime.empty((case.m, *map(int, part.shape[1:])), str(part.dtype)) for part in outputs
    ]

    def run(x: tvm.runtime.Tensor, *others: tvm.runtime.Tensor) -> None:
        quantize(x, *x_parts)
        product(*x_parts, *others)

    return tvm_kernel(case, run, "int8", "vpdpbusd")


def compiled(func: tirx.PrimFunc) -> Callable[..., None]:
    """As a build does it, with the tuning records that ship."""
    passes = [ApplyRecords(RULES), *scheduling_passes(TARGET)]
    with TARGET:
        mod = tvm.transform.Sequential(passes)(tvm.IRModule({"main": func}))
    assert mod["main"].attrs["sits.rule"] in ("Matmul", "QuantizeActivation")
    return tvm.compile(mod, target=TARGET)["main"]


def tvm_default_kernel(case: Case) -> Kernel:
    """What TVM makes of our PrimFunc without a schedule."""
    if case.flops > SLOW:
        raise NotMeasured("takes seconds")
    func = int4_matmul(case.m, case.n, case.k, case.spec, "float32", ORDER)
    target = {"kind": "llvm", "mcpu": tvm.get_global_func("target.llvm_get_system_cpu")()}
    return tvm_kernel(case, tvm.compile(func, target=tvm.target.Target(target))["main"], "float32")


def tvm_kernel(case: Case, func: Callable[..., None], rounds_to: str, peak: str = "") -> Kernel:
    """``func(x, *parts, y)`` with the parts of the weight in the format of `packing`."""
    x, y, parts = tvm.runtime.tensor(case.x), empty(case.m, case.n), packed(case)
    layers = [tuple(map(tvm.runtime.tensor, parts)) for _ in range(case.layers)]
    nbytes = sum(part.nbytes for part in parts)
    run = lambda: [func(x, *layer, y) for layer in layers]  # noqa: E731
    return Kernel(run, y.numpy, rounds_to, nbytes, peak, [layer[0] for layer in layers])


def packed(case: Case) -> list[np.ndarray]:
    layout = PackedLayout(case.n, case.k, case.spec, ORDER)
    codes = np.pad(case.codes, ((0, 0), (0, layout.padded_k - case.k)))
    rows = [pack_nibbles(codes), case.scale, pack_nibbles(case.zero_point)][: len(layout.shapes)]
    return [interleave(np.pad(part, ((0, -case.n % LANES), (0, 0))), LANES) for part in rows]


def empty(*shape: int) -> tvm.runtime.Tensor:
    """float32, all NaN: what a kernel does not write shows."""
    return tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
