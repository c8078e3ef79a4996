"""Kernels and schedules: the INT4 format, INT4 PrimFuncs, and the rules that schedule PrimFuncs."""

from tvm.ir.transform import Pass
from tvm.s_tir import dlight
from tvm.target import Target

import sits_tvm  # noqa: F401, first: it imports the modules of this package one by one

from .alignment import AcceptUnalignedTensors
from .apply import ApplySchedules
from .apply_records import ApplyRecords
from .attention import Attention
from .compute_bfloat16 import ComputeBfloat16
from .cuda_target import architecture
from .empty_tensors import EmptyOutput
from .explain_fallbacks import REASON, ExplainFallbacks
from .fake_quantize_gradient import FakeQuantizeGradient
from .fallback import CpuFallback
from .group_sums import GroupSums
from .matmul import Matmul
from .matmul_cuda import TensorCoreMatmul
from .quantize_activation import QuantizeActivation
from .quantize_activation_cuda import QuantizeActivationCuda
from .tuning_space import tuned_by, tuned_rows

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
