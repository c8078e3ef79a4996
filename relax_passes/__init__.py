"""Relax passes, in the order in which the pipeline runs them. Importing this registers our ops."""

from . import op
from .lower_attention import LowerAttention
from .quantize_matmul_weights import QuantizeMatmulWeights

__all__ = ["LowerAttention", "QuantizeMatmulWeights", "op"]
