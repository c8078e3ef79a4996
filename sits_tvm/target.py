"""`parse_target`: from what people write to a `tvm.target.Target` with its limits filled in.

TVM 0.27 reads a dictionary or a tag, and checks little of it: an architecture that does not
exist, a CPU that LLVM does not know and the shared-memory limit of an older GPU all pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NoReturn

import tvm
from tvm.target import Target

from ._target_cpu import complete_cpu, missing_on_host
from ._target_gpu import ARCH_EXAMPLE, ARCH_OPTION, STATIC_SHARED_MEMORY, complete_gpu
from ._target_text import near, read_target_text
from .diagnostics import Diagnostic, SitsError, emit

_SHARED = "max_shared_memory_per_block"
_HOST_KINDS = ("llvm", "c")
_HOW_TO_WRITE = 'write it like "cuda -arch=sm_90" or "llvm -mcpu=native"'


def parse_target(target: str | dict[str, Any] | Target) -> Target:
    """The target that `target` names, complete and checked, with a host.

    Parameters
    ----------
    target : str, dict or Target
        ``"cuda -arch=sm_90 -libs=cublas"``, ``"llvm -mcpu=znver4 -num-cores=2"``, a JSON object,
        a tag (``"sits/h200"``), their dictionary, or a `Target`. The host is ``--host=llvm``, or
        quoted where it has options: ``--host="llvm -mcpu=znver4"``.

    Returns
    -------
    Target
        CUDA: ``max_shared_memory_per_block`` (bytes, dynamic), ``max_threads_per_block``,
        ``registers_per_block`` and, where it is known, ``l2_cache_size_bytes`` are filled in
        from the architecture; bare ``cuda`` takes the architecture of the GPU in this machine.
        ``llvm -mcpu=native`` is this machine's CPU, and only there ``num-cores`` is filled in:
        with the cores that this process may use. A tag is replaced by what it stands for.
        Parsing the result again gives the same target.

    Raises
    ------
    SitsError
        With everything that is wrong with the target: an unknown kind, tag, option,
        architecture or CPU, a value of the wrong type or beyond the hardware, a kind that this
        TVM cannot generate code for, CUDA without an architecture on a machine without a GPU.
    """
    config = _complete(_config(target))
    if config["kind"] == "llvm" and "mcpu" not in config:
        emit(
            Diagnostic.note(
                "target-generic-cpu",
                "target llvm without -mcpu builds for the oldest CPU of its kind",
                help='write "llvm -mcpu=native" for the CPU of this machine',
            )
        )
    return Target(config)


def host_mismatch(target: Target) -> str:
    """Why CPU code for `target`, or for its host, may not run on this machine; "" if it does."""
    cpu = target if target.kind.name == "llvm" else target.host
    if cpu is None or cpu.kind.name != "llvm":
        return ""
    missing = ", ".join(missing_on_host(cpu))
    return (
        f"built for {cpu.attrs.get('mcpu', cpu)}; this machine lacks {missing}" if missing else ""
    )


def short_name(target: Target) -> str:
    """Kind and architecture: ``cuda -arch=sm_90``."""
    names = [f"-{name}={target.attrs[name]}" for name in ("arch", "mcpu") if name in target.attrs]
    return " ".join([target.kind.name, *names])


def _config(target: Any) -> dict[str, Any]:
    """`target` as a dictionary with a kind; its tag, if any, is resolved."""
    tags = tvm.target.list_tags() or {}
    if isinstance(target, str):
        target = read_target_text(target, set(tags))
    config = _plain(target)
    if not isinstance(config, dict):
        _fail("target-type", f"a {type(target).__name__} is no target: {target!r}", _HOW_TO_WRITE)
    tag = config.pop("tag", "")
    if tag:
        config = _expand(tag, tags, config)
    if config.get(_SHARED) == STATIC_SHARED_MEMORY and (tag or _is_tag(config, tags)):
        del config[_SHARED]  # TVM's tags give the static limit
    if not isinstance(config.get("kind"), str):
        _fail("target-kind-missing", f"the target {config} names no kind", _HOW_TO_WRITE)
    return config


def _plain(value: Any) -> Any:
    """TVM's containers as Python's."""
    if isinstance(value, Target):
        return _plain(value.export())
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _expand(tag: Any, tags: dict[str, Target], options: dict[str, Any]) -> dict[str, Any]:
    if tag not in tags:
        if "kind" in options:
            return options  # a label of the user's own
        _fail("target-tag-unknown", f"there is no target tag {tag!r}", near(str(tag), tags))
    config = {**_plain(tags[tag]), **options}
    del config["tag"]
    if config["kind"] != tags[tag].kind.name:
        kinds = f"{tags[tag].kind.name}, not {config['kind']}"
        _fail("target-kind-unknown", f"the tag {tag!r} is of kind {kinds}", "leave kind out")
    return config


def _is_tag(config: dict[str, Any], tags: dict[str, Target]) -> bool:
    """Whether a target without a tag is one all the same: TVM forgets the name."""

    def bare(target: Any) -> dict[str, Any]:
        return {k: v for k, v in _plain(target).items() if k not in ("tag", "host")}

    return any(bare(known) == bare(config) for known in tags.values())


def _complete(config: dict[str, Any], is_host: bool = False) -> dict[str, Any]:
    """`config` with its defaults, or a `SitsError` with all that is wrong with it."""
    kind = config["kind"]
    _check_kind(kind, is_host)
    problems = _check_options(config)
    wrong = {name for name, _ in problems}
    found = [problem for _, problem in problems]
    if kind in ARCH_OPTION and ARCH_OPTION[kind] not in wrong:
        found += complete_gpu(config)
    elif kind == "llvm" and not wrong & {"mcpu", "mtriple", "mattr"}:
        found += complete_cpu(config)
    if found:
        raise SitsError(found)
    if "host" in config or (kind not in _HOST_KINDS and _can_build("llvm")):
        config["host"] = _complete(_config(config.get("host", "llvm")), is_host=True)
    return config


def _check_kind(kind: str, is_host: bool) -> None:
    kinds = [str(name) for name in Target.list_kinds() if _can_build(name)]
    if kind not in list(Target.list_kinds()):
        _fail("target-kind-unknown", f"there is no target kind {kind!r}", near(kind, kinds))
    if kind not in kinds:
        found = f"this TVM has no code generator for target kind {kind!r}"
        _fail("target-kind-unsupported", found, f"it builds {', '.join(sorted(kinds))}")
    if is_host and kind not in _HOST_KINDS:
        _fail("target-host", f"{kind!r} cannot be a host", "write --host=llvm")


def _can_build(kind: str) -> bool:
    return tvm.get_global_func(f"target.build.{kind}", allow_missing=True) is not None


def _check_options(config: dict[str, Any]) -> list[tuple[str, Diagnostic]]:
    """What TVM says of each option by itself, so that all are found."""
    problems = []
    for name, value in config.items():
        if name not in ("kind", "host"):
            problem = _option_problem(config["kind"], name, value)
            problems += [(name, problem)] if problem else []
    return problems


def _option_problem(kind: str, name: str, value: Any) -> Diagnostic | None:
    option = f"option {name}={value!r} of target kind {kind}"
    if kind == "cuda" and name == "mcpu":
        help = 'write -arch=sm_90 for the GPU, --host="llvm -mcpu=native" for its host'
        return Diagnostic.error("target-option-unknown", f"{option} is of the host", help=help)
    if _is_count(name) and isinstance(value, int) and (isinstance(value, bool) or value < 1):
        help_ = "leave it out: it is filled in from the architecture"
        if name == "num-cores":
            help_ = "write -num-cores=2, or leave it out"
        return Diagnostic.error("target-option-type", f"{option} counts nothing", help=help_)
    if kind == "cuda" and name == "arch" and isinstance(value, str):
        return None  # complete_gpu knows better
    probe = {ARCH_OPTION[kind]: ARCH_EXAMPLE[kind]} if kind in ARCH_OPTION else {}
    try:
        Target({"kind": kind, **probe, name: value})
    except (ValueError, TypeError) as error:
        return _translate(str(error), option, name, value)
    return None


def _is_count(name: str) -> bool:
    return name in ("num-cores", "thread_warp_size") or name.startswith(("max_", "registers_"))


def _translate(text: str, option: str, name: str, value: Any) -> Diagnostic:
    """TVM's complaint about one option, in words that say what to write."""
    _, unknown, names = text.partition("Known options:")
    if unknown:
        known = re.findall(r"'([^']+)'", names.partition(". Target")[0])
        return Diagnostic.error(
            "target-option-unknown", f"{option}: no such option", help=near(name, known)
        )
    expected = re.search(r"expected type '([^']+)'", text)
    if not expected:
        message = f"{option}: {text.splitlines()[0]}"
        return Diagnostic.error("target-option", message, help="leave it out")
    takes = expected[1].replace("Array<str>", "list of str")
    example = f"; write {value}" if takes == "int" and str(value).isdigit() else ""
    if name == "arch":
        example = '; write "sm_90"'
    message = f"{option} is of type {type(value).__name__}"
    return Diagnostic.error("target-option-type", message, help=f"it takes {takes}{example}")


def _fail(code: str, message: str, help: str) -> NoReturn:
    raise SitsError([Diagnostic.error(code, message, help=help)])
