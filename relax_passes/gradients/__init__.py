"""Gradients of TVM's ops: importing this registers them, also for `relax.transform.Gradient`.

A rule of ours stands above TVM's where TVM's is missing, wrong (`astype`, `where` with
broadcasting, `take` of indices of any rank, kinks), or refuses symbolic shapes. Where TVM's is
right, `relax.transform.Gradient` keeps it.
"""

from . import (
    composites,
    convolutions,
    elementwise,
    lookups,
    products,
    quantize,
    reductions,
    shapes,
    slices,
)
from ._rules import rule_of
from .constants import ZERO_GRADIENT
from .reverse import ReverseMode, vector_jacobian

__all__ = [
    "ZERO_GRADIENT",
    "ReverseMode",
    "composites",
    "convolutions",
    "elementwise",
    "lookups",
    "products",
    "quantize",
    "reductions",
    "rule_of",
    "shapes",
    "slices",
    "vector_jacobian",
]
