"""Relax passes; README.md has their order. Importing this registers our ops."""

import sits_tvm  # noqa: F401, first: it imports the modules of this package one by one

from . import gradients, op
from ._import_fixes import IMPORT_FIXES
from .bound_kernel_extents import BoundKernelExtents
from .bound_take_indices import BoundTakeIndices
from .broadcast_infinite_fills import BroadcastInfiniteFills
from .canonicalize_attention import CanonicalizeAttention
from .canonicalize_codes import canonicalize_codes
from .check_sub_byte_buffers import CheckSubByteBuffers, check_sub_byte_buffers
from .fix_quantize_gradient import FixQuantizeGradient
from .gradient_conservation_check import GradientConservationCheck, gradient_conservation_check
from .inline_private_functions import InlinePrivateFunctions
from .inline_tuple_access import InlineTupleAccess
from .isolate_kernels import IsolateKernels
from .lower_attention import LowerAttention
from .normalize_negative_indices import NormalizeNegativeIndices
from .pack_fake_quantized_weights import PackFakeQuantizedWeights
from .prune_redundant_attention import PruneRedundantAttention
from .prune_redundant_heads import prune_redundant_heads
from .quantize_matmul_weights import QuantizeMatmulWeights
from .remove_stop_gradients import RemoveStopGradients
from .simplify_symbolic_shapes import SimplifySymbolicShapes
from .split_shared_operands import SplitSharedOperands
from .store_columns import StoreColumns
from .unpack_int4_constants import UnpackInt4Constants
from .widen_bfloat16_ops import WidenBfloat16Ops
from .widen_cumsum import WidenCumsum
from .widen_half_intrinsics import WidenHalfIntrinsics

__all__ = [
    "IMPORT_FIXES",
    "BoundKernelExtents",
    "BoundTakeIndices",
    "BroadcastInfiniteFills",
    "CanonicalizeAttention",
    "CheckSubByteBuffers",
    "FixQuantizeGradient",
    "GradientConservationCheck",
    "InlinePrivateFunctions",
    "InlineTupleAccess",
    "IsolateKernels",
    "LowerAttention",
    "NormalizeNegativeIndices",
    "PackFakeQuantizedWeights",
    "PruneRedundantAttention",
    "QuantizeMatmulWeights",
    "RemoveStopGradients",
    "SimplifySymbolicShapes",
    "SplitSharedOperands",
    "StoreColumns",
    "UnpackInt4Constants",
    "WidenBfloat16Ops",
    "WidenCumsum",
    "WidenHalfIntrinsics",
    "canonicalize_codes",
    "check_sub_byte_buffers",
    "gradient_conservation_check",
    "gradients",
    "op",
    "prune_redundant_heads",
]
