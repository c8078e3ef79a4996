"""`Executable`: what `build` returns, and how it is saved and loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.runtime import Tensor

from ._safetensors import read_safetensors, write_safetensors
from .diagnostics import Diagnostic, SitsError
from .report import Report
from .target import host_mismatch, parse_target

FORMAT_VERSION = 3
"""2: CUDA weights from sm_80 on are packed in the order "fragments"; they were in "rows".
3: the digest of the library, which was its size."""
_LIBRARY, _PARAMS, _REPORT, _META = (
    "library.so",
    "params.safetensors",
    "report.json",
    "executable.json",
)
_NO_LOADER = "a loader of that name is not registered"  # TVM, of a module it has no runtime for


class Executable(relax.VMExecutable):
    """A `relax.VMExecutable` with its parameters and its report.

    Attributes
    ----------
    report : Report
        What was done, and what was not and why.
    params : dict of str to Tensor
        The parameters as the functions take them, INT4 weights packed, on the CPU. Empty if the
        build got none.
    param_names : dict of str to list of str
        For each public function, the names of the arguments after its inputs, in order.
    cubins : list of bytes
        Checked device code of a CUDA build; empty otherwise.
    """

    def __init__(
        self,
        mod: tvm.runtime.Module,
        report: Report,
        params: Mapping[str, Tensor],
        param_names: Mapping[str, Sequence[str]],
        cubins: Sequence[bytes] = (),
    ) -> None:
        super().__init__(mod)
        self.report = report
        self.params = dict(params)
        self.param_names = {name: list(names) for name, names in param_names.items()}
        self.cubins = list(cubins)

    @property
    def param_list(self) -> list[Tensor]:
        """The parameters of ``main`` (or of the only function) in the order it takes them.

        Raises
        ------
        KeyError
            As `params_for`: an executable that was built without parameters has none.
        """
        names = list(self.param_names)
        return self.params_for("main" if "main" in names or len(names) != 1 else names[0])

    def params_for(self, function: str, device: tvm.runtime.Device | None = None) -> list[Tensor]:
        """The parameters of `function` in its order, copied to `device` if one is given.

        Raises
        ------
        KeyError
            If there is no such function, or the executable was built without parameters.
        """
        if function not in self.param_names:
            raise KeyError(f"no function {function!r}; there are {', '.join(self.param_names)}")
        names = self.param_names[function]
        missing = [name for name in names if name not in self.params]
        if missing:
            packer = f"{function}_transform_params"
            otherwise = "give the float weights themselves"
            if f"@{packer}:" in self.as_text():
                otherwise = f'call vm["{packer}"] on the float ones'
            raise KeyError(
                f"built without parameters ({', '.join(missing[:3])} …): pass params= to build, or "
                f"{otherwise}"
            )
        tensors = [self.params[name] for name in names]
        return tensors if device is None else [tensor.copyto(device) for tensor in tensors]

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write library, parameters, report and cubins to `directory`, all or nothing.

        An older executable there is replaced at the end.

        Raises
        ------
        SitsError
            If the directory cannot be written, or holds something else.
        """
        path = Path(directory).resolve()
        draft = _draft(path)
        try:
            self._write(draft)
            _replace(path, draft)
        except OSError as error:
            raise _not_writable(path, error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return path

    def _write(self, directory: Path) -> None:
        try:
            self.export_library(str(directory / _LIBRARY))
        except (OSError, RuntimeError, TypeError) as error:  # TypeError: TVM found no compiler
            reason = [type(error).__name__, *str(error).strip().splitlines()][-1]
            message = f"the library was not linked: {reason}"
            help_ = "a C++ compiler links it, with room in the folder of temporary files"
            raise _error("library-not-linked", message, help=help_) from error
        write_safetensors(directory / _PARAMS, self.params)
        (directory / _REPORT).write_text(self.report.to_json())
        for i, cubin in enumerate(self.cubins):
            (directory / f"device_{i}.cubin").write_bytes(cubin)
        meta = {
            "format_version": FORMAT_VERSION,
            "target": self.report.target,
            "param_names": self.param_names,
            "cubins": len(self.cubins),
            "library_sha256": _digest(directory / _LIBRARY),
        }
        (directory / _META).write_text(json.dumps(meta, indent=1))
        directory.chmod(0o755)


def check_output(path: Path) -> None:
    """Raise SitsError if `Executable.save` could not write to `path`."""
    _draft(path.resolve()).rmdir()


def _draft(path: Path) -> Path:
    """A new folder beside `path`, which must not exist yet or hold a saved executable."""
    if path.exists() and not path.is_dir():
        raise _error("output-not-a-folder", f"{path} is a file", help="give a folder")
    try:
        others = _others(path) if path.exists() else []
        if others:
            found = f"{path} holds {', '.join(sorted(others)[:3])}, which is of no saved executable"
            raise _error("output-not-empty", found, help="give an empty or new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise _not_writable(path, error) from error


def _others(path: Path) -> list[str]:
    """What `Executable.save` did not write into a folder: everything, if it wrote none."""
    ours = {_LIBRARY, _PARAMS, _REPORT, _META} if (path / _META).exists() else set()
    return [
        entry.name
        for entry in path.iterdir()
        if entry.name not in ours and not (ours and entry.match("device_*.cubin"))
    ]


def _replace(path: Path, draft: Path) -> None:
    """Put `draft` in the place of `path`; what was there comes back if that fails.

    Where a process is killed in between, `load` finds the old one, set aside.
    """
    aside = _aside(path)
    if path.exists():
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
    try:
        draft.rename(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _aside(path: Path) -> Path:
    """Where `_replace` puts an older executable."""
    return path.with_name(f".{path.name}.old")


def load(directory: str | os.PathLike[str]) -> Executable:
    """Read what `Executable.save` wrote; it computes the same results bit for bit.

    Raises
    ------
    SitsError
        If the directory is no saved executable, lacks a part, is of another format version, was
        built for a CPU that this machine is not, or for CUDA on a machine without a driver.
    """
    path = Path(directory)
    if not path.exists() and _aside(path.resolve()).exists():
        path = _aside(path.resolve())  # a `save` over it was killed
    meta = _read_meta(path)
    mismatch = host_mismatch(parse_target(meta["target"]))
    if mismatch:
        raise _error("target-not-this-machine", f"{path}: {mismatch}", help="build it for this CPU")
    _check_library(path / _LIBRARY, meta["library_sha256"])
    try:
        module = tvm.runtime.load_module(str(path / _LIBRARY))
    except Exception as error:
        if _NO_LOADER not in str(error):
            message = f"{path / _LIBRARY}: {error}"
            raise _error("library-not-loadable", message, help="build it again") from error
        raise _error(
            "cuda-not-available",
            f"{path} was built for {meta['target']}, and this machine has no CUDA driver",
            help="load it on a machine with the driver; its cubins lie beside the library",
        ) from error
    params = read_safetensors(path / _PARAMS)
    missing = {name for names in meta["param_names"].values() for name in names} - {*params}
    if params and missing:
        message = f"{path / _PARAMS} lacks {', '.join(sorted(missing))}"
        raise _error("executable-damaged", message, help="build it again")
    try:
        report = Report.from_json((path / _REPORT).read_text())
        cubins = [(path / f"device_{i}.cubin").read_bytes() for i in range(meta["cubins"])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{path}: {type(error).__name__}: {error}"
        raise _error("executable-damaged", message, help="build it again") from error
    return Executable(module, report, params, meta["param_names"], cubins)


def _check_library(library: Path, digest: str) -> None:
    """Loading a library that is cut off or changed would end the process."""
    try:
        found = _digest(library)
    except OSError as error:
        message = f"{library}: {error}"
        raise _error("library-not-loadable", message, help="copy it again") from error
    if found != digest:
        message = f"{library} is not the one that was saved: another SHA-256"
        raise _error("library-not-loadable", message, help="copy it again, all of it")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / _META).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _error(
            "not-an-executable", f"{path} holds no saved executable ({error})",
            help="give the folder that Executable.save or `python -m sits_tvm build -o` wrote",
        ) from error  # fmt: skip
    version = meta.get("format_version") if isinstance(meta, dict) else None
    if version != FORMAT_VERSION:
        message = f"{path} has format version {version}, this release reads {FORMAT_VERSION}"
        raise _error("format-version", message, help="build it again")
    faults = [f"`{key}` is no {kind}" for key, kind in _KEYS.items() if not _is(meta, key, kind)]
    if not faults and not all(map(_are_names, meta["param_names"].values())):
        faults = ["`param_names` holds no lists of names"]
    if faults:
        message = f"{path / _META}: {', '.join(faults)}"
        raise _error("executable-damaged", message, help="build it again")
    return meta


_KEYS = {"target": "str", "param_names": "dict", "cubins": "int", "library_sha256": "str"}


def _is(meta: dict[str, Any], key: str, kind: str) -> bool:
    return type(meta.get(key)).__name__ == kind


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _not_writable(path: Path, error: OSError) -> SitsError:
    message = f"cannot write {path}: {error}"
    return _error("output-not-writable", message, help="give another folder")


def _error(code: str, message: str, *, help: str) -> SitsError:
    return SitsError([Diagnostic.error(code, message, help=help)])
