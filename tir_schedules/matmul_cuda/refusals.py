"""Which products with an INT4 weight `TensorCoreMatmul` leaves to TVM's rules, and why."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx
from tvm.target import Target

from sits_tvm.target import short_name

from ..contraction import Contraction, Int4Weight, Int8Rows
from ..cuda_target import architecture
from ..tir_nodes import is_const
from .int8 import LARGEST_CHANNEL, LARGEST_GROUP
from .terms import TERMS

SMALLEST_ARCH = 80
DTYPE_TERMS = {"float16": 1, "bfloat16": 1, "float32": TERMS}
"""By the dtype of activations: the numbers of two bytes that one is the sum of."""


@dataclass(frozen=True)
class Refusal:
    """What was found, and what to write instead; "" where nothing helps."""

    reason: str
    help: str = ""


def refused_target(target: Target) -> Refusal | None:
    """None for a GPU that the kernels run on."""
    if target.kind.name == "cuda" and architecture(target) >= SMALLEST_ARCH:
        return None
    reason = f"{short_name(target)} is older than sm_{SMALLEST_ARCH}"
    if target.kind.name != "cuda":
        reason = f"there are none of ours for {short_name(target)}"
    return Refusal(reason, f'build for "cuda -arch=sm_{SMALLEST_ARCH}" or newer')


def refused_product(product: Contraction | None) -> Refusal | None:
    """None for a product that the kernels compute; that of a function, as `recognise` finds it."""
    if product is None or not isinstance(product.rhs, Int4Weight):
        return Refusal("what is computed before or after the product is not understood")
    if isinstance(product.lhs, Int8Rows):
        return _refused_group(product.rhs, int(product.padded_k))
    x, k = plain_activations(product), int(product.reduction.dom.extent)
    if x is None:
        return Refusal("the activations are no tensor in memory with rows of all input channels")
    terms = DTYPE_TERMS.get(str(x.dtype))
    if terms is None:
        return Refusal(
            f"activations are {x.dtype}", f"cast them to one of {', '.join(DTYPE_TERMS)}"
        )
    if terms == 1 and k % 2:
        reason = f"k={k} is odd: rows of {x.dtype} are copied four bytes at a time"
        return Refusal(reason, f"pad k to {k + 1}, with zeros in the weight and in the activations")
    return None


def _refused_group(weight: Int4Weight, k: int) -> Refusal | None:
    """A channel that is one group of more columns than an int32 holds the sum of."""
    if weight.group_size <= LARGEST_GROUP or k <= LARGEST_CHANNEL:
        return None
    reason = f"one group has k={k} columns: an int32 holds the sum of {LARGEST_CHANNEL}"
    return Refusal(reason, f"take group_size=128, or at most {LARGEST_CHANNEL} input channels")


def plain_activations(product: Contraction) -> tirx.Buffer | None:
    """The buffer of the left operand, if it is that, in rows of k, and nothing else."""
    value = product.lhs.value if isinstance(product.lhs, tirx.Cast) else product.lhs
    if not isinstance(value, ir.TensorLoad) or product.batch.iters:
        return None
    axes = [axis.var for axis in (*product.rows.iters, product.reduction)]
    found = [index for index in value.indices if not is_const(index, 0)]
    same = len(found) == len(axes) and all(a.same_as(b) for a, b in zip(axes, found, strict=True))
    return value.source if same else None
