"""Kernels and schedules: the INT4 format, INT4 PrimFuncs, and the rules that schedule PrimFuncs.

- `int4_format`: how weights are packed, and which integers activations become
- `quantization`: affine quantization and packing inside a compiled program
- `matmul`: what matrix products compute, and how they are recognised; scheduled by `matmul_cpu` and
  `matmul_cuda`, the quantization of their activations by `activations`
- `attention`: fused attention, from the op to kernels for CPUs and CUDA
- `cpu`: a schedule for whatever has no rule of its own, and passes after the schedules
- `records`: what kernels leave open, and the database of what tuning found

`rule.py` of a package schedules what it is about. Modules beside the packages serve all of them.
"""

from tvm.ir.transform import Pass
from tvm.s_tir import dlight
from tvm.target import Target

import sits_tvm  # noqa: F401, first: it imports the modules of this package one by one

from .activations.cpu import QuantizeActivation
from .activations.cuda import QuantizeActivationCuda
from .apply import ApplySchedules
from .attention.rule import Attention
from .cpu.alignment import AcceptUnalignedTensors
from .cpu.compute_bfloat16 import ComputeBfloat16
from .cpu.fallback import CpuFallback
from .cuda_target import architecture
from .empty_tensors import EmptyOutput
from .matmul_cpu.rule import Matmul
from .matmul_cuda.explain_fallbacks import REASON, ExplainFallbacks
from .matmul_cuda.rule import TensorCoreMatmul
from .quantization.fake_quantize_gradient import FakeQuantizeGradient
from .quantization.group_sums import GroupSums
from .records.apply_records import ApplyRecords
from .records.space import tuned_by, tuned_rows

RULES: tuple[dlight.ScheduleRule, ...] = (
    EmptyOutput(),
    Attention(),
    Matmul(),
    TensorCoreMatmul(),
    QuantizeActivation(),
    QuantizeActivationCuda(),
    FakeQuantizeGradient(),
    CpuFallback(),
    GroupSums(),
    dlight.gpu.Matmul(),
    dlight.gpu.GEMV(),
    dlight.gpu.Reduction(),
    dlight.gpu.GeneralReduction(),
    dlight.gpu.Fallback(),
)
"""In order of preference; each leaves functions and targets that are not its own alone."""


def scheduling_passes(target: Target) -> list[Pass]:
    """From PrimFuncs without a schedule to kernels that the target can run."""
    if target.kind.name == "llvm":
        return [ApplySchedules(*RULES), ComputeBfloat16(), AcceptUnalignedTensors()]
    return [ExplainFallbacks(), ApplySchedules(*RULES)]


def weight_order(target: Target) -> str:
    """The order in which the target's INT4 kernels read packed weights, see `packing`."""
    if target.kind.name == "llvm":
        return "vectors"
    return "fragments" if target.kind.name == "cuda" and architecture(target) >= 80 else "rows"


__all__ = [
    "REASON",
    "RULES",
    "AcceptUnalignedTensors",
    "ApplyRecords",
    "ApplySchedules",
    "ComputeBfloat16",
    "ExplainFallbacks",
    "scheduling_passes",
    "tuned_by",
    "tuned_rows",
    "weight_order",
]
