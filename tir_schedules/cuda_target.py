"""What a kernel asks of a cuda target."""

import re

from tvm.target import Target


def architecture(target: Target) -> int:
    """90 for ``-arch=sm_90a``; 0 where the target names no architecture."""
    number = re.search(r"\d+", str(target.attrs.get("arch", "")))
    return int(number[0]) if number else 0
