"""GPU targets: which architectures exist, and what they allow a block."""

from __future__ import annotations

import re
from typing import Any

import tvm

from .diagnostics import Diagnostic

STATIC_SHARED_MEMORY = 49152
"""Bytes of static shared memory that a CUDA block may have, on every architecture."""

ARCH_OPTION = {"cuda": "arch", "nvptx": "mcpu", "rocm": "mcpu"}
"""The option that names the architecture. Without it TVM takes a GPU of ten years ago."""

ARCH_EXAMPLE = {"cuda": "sm_90", "nvptx": "sm_90", "rocm": "gfx90a"}

# Bytes of dynamic shared memory per block (opt-in maximum) on what CUDA 13 compiles for. Source:
# NVIDIA's CCCL 13.3, cuda/__device/arch_traits.h, `max_shared_memory_per_block_optin`.
_SHARED_MEMORY = {
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_87": 166912,
    "sm_88": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_107": 232448,
    "sm_110": 232448,
    "sm_120": 101376,
    "sm_121": 101376,
}
# Bytes of L2 cache. It belongs to a product, not to an architecture: these are T4, A100,
# RTX 3090, Jetson Orin, RTX 4090 and H100/H200. No figure where products differ too much.
_L2_CACHE = {
    "sm_75": 4 << 20,
    "sm_80": 40 << 20,
    "sm_86": 6 << 20,
    "sm_87": 4 << 20,
    "sm_89": 72 << 20,
    "sm_90": 50 << 20,
}


def architectures() -> list[str]:
    """Every CUDA architecture, those with features of their own (sm_90a, sm_100f) included."""
    suffixes = {"sm_90": ("", "a"), **dict.fromkeys(list(_SHARED_MEMORY)[7:], ("", "a", "f"))}
    return [arch + end for arch in _SHARED_MEMORY for end in suffixes.get(arch, ("",))]


def shared_memory_limit(arch: str) -> int:
    """Bytes of shared memory that a block may have on a CUDA architecture of `architectures`."""
    return _SHARED_MEMORY[arch.rstrip("af")]


def complete_gpu(config: dict[str, Any]) -> list[Diagnostic]:
    """Fill in the architecture and its limits; return what is wrong with them."""
    kind, option = config["kind"], ARCH_OPTION[config["kind"]]
    arch = config.get(option)
    if arch is None and kind == "cuda":
        arch = _arch_of_this_gpu()
    if arch is None:
        return [_arch_missing(kind, option)]
    if kind != "rocm" and arch not in architectures():
        return [_arch_unknown(arch)]
    config[option] = arch
    return _complete_limits(config, arch.rstrip("af")) if kind == "cuda" else []


def _complete_limits(config: dict[str, Any], arch: str) -> list[Diagnostic]:
    limits = _limits(arch)
    given = {name: config[name] for name in limits if isinstance(config.get(name), int)}
    config.update({name: config.get(name, most) for name, most in limits.items()})
    if arch in _L2_CACHE:
        config.setdefault("l2_cache_size_bytes", _L2_CACHE[arch])
    return [
        Diagnostic.error(
            "target-limit",
            f"option {name}={value} is beyond {arch}, which has {limits[name]}",
            help=f"leave {name} out: it is filled in from the architecture",
        )
        for name, value in given.items()
        if value > limits[name]
    ]


def _limits(arch: str) -> dict[str, int]:
    return {
        "max_shared_memory_per_block": shared_memory_limit(arch),
        "max_threads_per_block": 1024,
        "max_num_threads": 1024,
        "registers_per_block": 65536,
        "thread_warp_size": 32,
    }


def _arch_of_this_gpu() -> str | None:
    device = tvm.cuda(0)
    return "sm_" + device.compute_version.replace(".", "") if device.exist else None


def _arch_missing(kind: str, option: str) -> Diagnostic:
    found = ", and this machine has no GPU to take it from" if kind == "cuda" else ""
    return Diagnostic.error(
        "target-arch-missing",
        f"target kind {kind} needs an architecture{found}",
        help=f'write "{kind} -{option}={ARCH_EXAMPLE[kind]}"',
    )


def _arch_unknown(arch: str) -> Diagnostic:
    number = re.search(r"\d+[af]?", arch)
    respelled = f"sm_{number[0]}" if number else ""
    help = f"known: {', '.join(architectures())}"
    if respelled in architectures():
        help = f"did you mean {respelled}?"
    message = f"there is no architecture {arch!r} that CUDA 13 compiles for"
    return Diagnostic.error("target-arch-unknown", message, help=help)


tvm.target.register_tag(
    "sits/h200",
    {
        "kind": "cuda",
        "arch": "sm_90a",
        **_limits("sm_90"),
        "l2_cache_size_bytes": _L2_CACHE["sm_90"],
    },
    override=True,
)
