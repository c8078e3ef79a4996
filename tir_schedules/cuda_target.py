"""What a kernel asks of a cuda target."""

import re

from tvm.target import Target


def architecture(target: Target) -> int:
    """90 for ``-arch=sm_90a``; 0 where the target names no architecture."""
    number = re.search(r"\d+", str(target.attrs.get("arch", "")))
    return int(number[0]) if number else 0


_SHARED_MEMORY = 48 << 10
_MULTIPROCESSORS = {80: 108, 86: 84, 87: 16, 89: 128, 90: 132}
"""They belong to a product: A100, RTX 3090, Jetson Orin, RTX 4090, H100 and H200."""


def multiprocessors(target: Target) -> int:
    return _MULTIPROCESSORS.get(architecture(target), 132)


def has_warpgroup_products(target: Target) -> bool:
    """Whether there is `wgmma`, which belongs to sm_90a alone."""
    return str(target.attrs.get("arch", "")) == "sm_90a"


def has_int4_products(target: Target) -> bool:
    """Whether tensor cores multiply INT4: Ampere's and Ada's do, none after them."""
    return 80 <= architecture(target) < 90


def shared_memory(target: Target) -> int:
    """Bytes that a block may have."""
    return int(target.attrs.get("max_shared_memory_per_block", _SHARED_MEMORY))
