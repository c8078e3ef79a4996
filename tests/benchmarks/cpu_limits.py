"""What this CPU reaches at most through TVM: reading memory, and one instruction over and over.

Kernels are timed beside these, in the same rounds: a machine that others use has no fixed speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm.script import tirx as T
from tvm.target import Target

from tir_schedules.cpu_target import cores, vector_lanes

LINE = 64  # bytes
READS = ((16, 1), (4, 4), (2, 8))
"""Cache lines side by side in a stream, and streams of a thread; which is fastest varies."""
CHAINS, STEPS = 16, 1 << 20

_BFLOAT16_DOT = """
define linkonce_odr <16 x float> @bench_dpbf16ps(<16 x float> %c, <16 x float> %a) alwaysinline {
  %x = bitcast <16 x float> %a to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %x)
  ret <16 x float> %r
}
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""


@dataclass(frozen=True)
class Peak:
    """A run that does `operations` and nothing else."""

    run: Callable[[], object]
    operations: int


def reads(tensors: Sequence[tvm.runtime.Tensor], target: Target) -> dict[str, Callable]:
    """Runs that read all of every tensor once; these have one shape, of a multiple of 2 KiB."""
    threads = cores(target)
    nbytes = tensors[0].numpy().nbytes
    out = tvm.runtime.tensor(np.zeros((threads, 16), "int32"))
    runs = {}
    for lines, streams in READS:
        shape = (threads, streams, nbytes // (LINE * lines * streams * threads), lines, 16)
        if int(np.prod(shape)) * 4 != nbytes:
            raise ValueError(
                f"{nbytes} bytes are no multiple of {shape[1]} streams of {lines} lines"
            )
        kernel = tvm.compile(_read(shape), target=target)["main"]
        views = [tensor._create_view(shape, "int32") for tensor in tensors]
        runs[f"read {lines}x{streams}"] = lambda kernel=kernel, views=views: [
            kernel(view, out) for view in views
        ]
    return runs


def peak(instruction: str, target: Target) -> Peak | None:
    """A run of "fma", "vpdpbusd" or "vdpbf16ps"; None if the target does not have it."""
    has = tvm.get_global_func("target.target_has_feature")
    if instruction == "fma":
        return _peak(_fma, "float32", vector_lanes(target), 2, target)
    if instruction == "vpdpbusd":
        return _peak(_vpdpbusd, "int32", 16, 8, target) if has("avx512vnni", target) else None
    if instruction == "vdpbf16ps":
        return _peak(_vdpbf16ps, "float32", 16, 4, target) if has("avx512bf16", target) else None
    raise ValueError(instruction)


def _read(shape: tuple[int, ...]) -> tvm.tirx.PrimFunc:
    threads, streams, rows, lines, _ = shape

    @T.prim_func(s_tir=True)
    def read(memory: T.Buffer(shape, "int32"), out: T.Buffer((threads, 16), "int32")):
        T.func_attr({"tirx.noalias": True})
        for p in T.parallel(threads):
            acc = T.alloc_buffer((16,), "int32", scope="local")
            acc[T.ramp(0, 1, 16)] = T.Broadcast(T.int32(0), 16)
            for r in range(rows):
                for s in T.unroll(streams):
                    for u in T.unroll(lines):
                        line = memory[p, s, r, u, T.ramp(0, 1, 16)]
                        acc[T.ramp(0, 1, 16)] = T.bitwise_xor(acc[T.ramp(0, 1, 16)], line)
            out[p, T.ramp(0, 1, 16)] = acc[T.ramp(0, 1, 16)]

    return read


def _peak(step: Callable, dtype: str, lanes: int, per_lane: int, target: Target) -> Peak:
    """`step` (accumulator, operand) in independent chains; `per_lane` operations in each lane."""
    threads = cores(target)

    @T.prim_func(s_tir=True)
    def repeat(operand: T.Buffer((lanes,), dtype), out: T.Buffer((threads, CHAINS, lanes), dtype)):
        T.func_attr({"tirx.noalias": True})
        with T.attr(0, "pragma_import_llvm", _BFLOAT16_DOT if step is _vdpbf16ps else ""):
            for p in T.parallel(threads):
                acc = T.alloc_buffer((CHAINS, lanes), dtype, scope="local")
                for i in T.unroll(CHAINS):
                    acc[i, T.ramp(0, 1, lanes)] = T.Broadcast(T.Cast(dtype, 0), lanes)
                for _ in range(STEPS):
                    for i in T.unroll(CHAINS):
                        acc[i, T.ramp(0, 1, lanes)] = step(
                            acc[i, T.ramp(0, 1, lanes)], operand[T.ramp(0, 1, lanes)]
                        )
                for i in T.unroll(CHAINS):
                    out[p, i, T.ramp(0, 1, lanes)] = acc[i, T.ramp(0, 1, lanes)]

    kernel = tvm.compile(repeat, target=target)["main"]
    operand = tvm.runtime.tensor(np.zeros(lanes, dtype))
    out = tvm.runtime.tensor(np.zeros((threads, CHAINS, lanes), dtype))
    return Peak(lambda: kernel(operand, out), threads * CHAINS * STEPS * lanes * per_lane)


def _fma(acc, operand):
    return acc * operand + operand


def _vpdpbusd(acc, operand):
    bytes_ = T.reinterpret(operand, dtype="int8x64")
    intrinsic = T.llvm_lookup_intrinsic_id("llvm.x86.avx512.vpdpbusd.512")
    return T.call_llvm_pure_intrin(intrinsic, acc, bytes_, bytes_, dtype="int32x16")


def _vdpbf16ps(acc, operand):
    return T.call_extern("float32x16", "bench_dpbf16ps", acc, operand)
