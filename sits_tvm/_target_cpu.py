"""CPU targets: which CPUs LLVM knows, and which one this machine has."""

from __future__ import annotations

import os
import re
from typing import Any

import tvm
from tvm.target import Target, codegen

from ._target_text import near
from .diagnostics import Diagnostic

_ALIASES = r"arm64|amd64|i[3-6]86|x86_64h|ppc|ppc64|ppc64le|(arm|thumb)v[4-8]\w*"


def complete_cpu(config: dict[str, Any]) -> list[Diagnostic]:
    """Replace ``native`` by this machine's CPU; return what LLVM does not know."""
    arch = config.get("mtriple", codegen.llvm_get_system_triple()).partition("-")[0]
    if not _llvm_knows(arch):
        message = f"LLVM has no target for mtriple={config['mtriple']!r}"
        help = near(arch, codegen.llvm_get_targets())
        return [Diagnostic.error("target-triple-unknown", message, help=help)]
    if config.get("mcpu") == "native":
        if arch != codegen.llvm_get_system_triple().partition("-")[0]:
            message = f"mcpu=native is the CPU of this machine, not one of {config['mtriple']!r}"
            return [Diagnostic.error("target-mcpu-unknown", message, help="write the CPU's name")]
        config["mcpu"] = codegen.llvm_get_system_cpu()
        config.setdefault("num-cores", cores())
    return _check_cpu(config, arch) or _check_features(config)


def _check_cpu(config: dict[str, Any], arch: str) -> list[Diagnostic]:
    known = [str(name) for name in codegen.llvm_get_cpu_archlist(_probe(config, "mtriple"))]
    cpu = config.get("mcpu")
    if cpu is None or cpu in known or _is_alias(config):
        return []
    message = f"LLVM has no CPU mcpu={cpu!r} for {arch}"
    return [Diagnostic.error("target-mcpu-unknown", message, help=near(cpu, known))]


def _is_alias(config: dict[str, Any]) -> bool:
    """LLVM's list lacks its second names (apple-m1); an unknown name gets no features at all."""
    generic = set(codegen.llvm_get_cpu_features(_probe(config, "mtriple")))
    return set(codegen.llvm_get_cpu_features(_probe(config, "mtriple", "mcpu"))) != generic


def _check_features(config: dict[str, Any]) -> list[Diagnostic]:
    return [
        Diagnostic.error(
            "target-feature-unknown",
            f"LLVM has no CPU feature mattr={feature!r}",
            help="write +NAME or -NAME with LLVM's names, for example -mattr=+avx2,-avx512f",
        )
        for feature in config.get("mattr", [])
        if feature[:1] not in ("+", "-") or not _has_feature(config, feature[1:])
    ]


def _has_feature(config: dict[str, Any], name: str) -> bool:
    """LLVM lists what is switched on, so switch it on and look."""
    target = _probe({**config, "mattr": [f"+{name}"]}, "mtriple", "mcpu", "mattr")
    return name in codegen.llvm_get_cpu_features(target)


def _probe(config: dict[str, Any], *options: str) -> Target:
    return Target({"kind": "llvm", **{key: config[key] for key in options if key in config}})


def _llvm_knows(arch: str) -> bool:
    """To ask LLVM about the CPUs of an architecture that it does not know ends the process."""
    known = [str(name) for name in codegen.llvm_get_targets()]
    return arch in known or re.fullmatch(_ALIASES, arch) is not None


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Extensions that LLVM uses on its own account; the others need an intrinsic.
_GENERATED = r"avx|sse|ssse|fma|f16c|bmi|lzcnt|popcnt|movbe|egpr|ndd|ccmp|zu$|sve|fullfp16|lse"


def missing_on_host(target: Target) -> list[str]:
    """What code for an llvm `target` may use and this machine lacks; empty if it runs here."""
    triple = str(target.attrs.get("mtriple", codegen.llvm_get_system_triple()))
    ours = codegen.llvm_get_system_triple().partition("-")[0]
    if triple.partition("-")[0] != ours:
        return [triple.partition("-")[0]]
    here = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    needed = sorted(str(name) for name in codegen.llvm_get_cpu_features(target))
    return [name for name in needed if re.match(_GENERATED, name) and not here.get(name, True)]
