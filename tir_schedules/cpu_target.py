"""What a schedule asks of an llvm target."""

from tvm import get_global_func
from tvm.target import Target

_DEFAULT_CORES = 8
"""Where the target has no num-cores."""


def cores(target: Target) -> int:
    """Threads that a kernel should have work for."""
    return int(target.attrs.get("num-cores", _DEFAULT_CORES))


def vector_lanes(target: Target) -> int:
    """float32 lanes in a vector register of an llvm target: 16, 8 or 4.

    TVM's `llvm_get_vector_width` answers 512 bits for every x86, and `llvm_cpu_has_features` does
    not see ``-mattr``.
    """
    return 16 if has_feature("avx512f", target) else 8 if has_feature("avx2", target) else 4


def has_feature(name: str, target: Target) -> bool:
    """Whether LLVM may use a feature of the CPU, by its own name for it."""
    return bool(get_global_func("target.target_has_feature")(name, target))
