"""``python -m sits_tvm build|lower|check|tune|info``: the package from the shell."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tvm.ir import IRModule, save_json

from . import build, from_onnx, from_pretrained, from_torch, lower, tune
from ._json_ir import read_json_module
from .config import Config, QuantSpec
from .diagnostics import Diagnostic, SitsError
from .driver import preview
from .environment import describe, table
from .executable import check_output
from .optional_packages import require

MODEL_HELP = (
    "a directory or .gguf file (from_pretrained), a .pt2 program (from_torch), an .onnx file "
    "(from_onnx), or a Relax module as .json (tvm.ir.save_json)"
)
OUTPUT = {"build": "as Executable.save writes it", "lower": "module.json and report.json"}
_LOG = logging.getLogger("sits_tvm")
CONFIG_HELP = "FILE.yaml holds fields of sits_tvm.Config, for example quant: {group_size: 32}"


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand. Returns 0; 1 after an error in what was given, or where what reads the
    output (``| head``) closes it; argparse exits with 2.
    """
    args = _parser().parse_args(argv)
    _show_progress(quiet=args.quiet)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except SitsError as error:
        return _fail(error.diagnostics, args.json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed again at exit
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sits_tvm",
        description="Models with INT4 weights. build, lower, check and tune do what the functions "
        "of sits_tvm do, info describes this machine; help(sits_tvm.Config) says what --config "
        "takes.",
    )
    commands = parser.add_subparsers(required=True, metavar="build|lower|check|tune|info")
    for name, run, text in (
        ("build", _build, "compile a model and print the report; only -o keeps what was compiled"),
        ("lower", _lower, "stop before code generation; print or save the IR"),
        ("check", _check, "print what build would say before code generation (without nvcc)"),
        ("tune", _tune, "measure parameters for the kernels of a model"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("model", type=Path, metavar="MODEL", help=MODEL_HELP)
        command.add_argument("--target", default="llvm -mcpu=native", help="default: %(default)s")
        command.add_argument(
            "--int4", action="store_true", help="INT4 weights: Config(quant=QuantSpec())"
        )
        command.add_argument("--config", type=Path, metavar="FILE.yaml", help="fields of Config")
        if name == "tune":
            _tuning(command)
        elif name != "check":
            command.add_argument("-o", dest="output", type=Path, metavar="DIR", help=OUTPUT[name])
        _common(command, run)
    info = commands.add_parser("info", help="what this machine can do, and what is missing")
    _common(info, _info)
    return parser


def _tuning(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--work-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="trials, and DIR/database for Config.database; a later call goes on there",
    )
    runners = "local, rpc with TVM_TRACKER_…, static"
    command.add_argument("--runner", default="local", help=f"{runners}; default: %(default)s")
    trials = "per kernel and range of rows, earlier calls included"
    command.add_argument("--trials", type=int, default=64, help=f"{trials}; default: %(default)s")
    budget = "for all kernels; checked between batches of candidates; default: no end"
    command.add_argument("--time-budget", type=float, metavar="SECONDS", help=budget)


def _common(command: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    command.add_argument("--json", action="store_true", help="machine-readable output")
    command.add_argument("--quiet", action="store_true", help="no progress on stderr")
    command.set_defaults(run=run)


def _build(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_output(args.output)
    config = _config(args)
    mod, params = _model(args.model)
    executable = build(mod, args.target, params=params, config=config)
    if args.output is not None:
        executable.save(args.output)
    else:
        _LOG.info("nothing is saved without -o DIR")
    print(executable.report.to_json() if args.json else executable.report)
    return 0


def _lower(args: argparse.Namespace) -> int:
    config = _config(args)
    mod, params = _model(args.model)
    lowered, report = lower(mod, args.target, params=params, config=config)
    if args.output is not None:
        _write(args.output, {"module.json": save_json(lowered), "report.json": report.to_json()})
    elif not args.json:
        print(lowered.script())
    print(report.to_json() if args.json else report)
    return 0


def _write(directory: Path, files: dict[str, str]) -> None:
    """Each file all or nothing: none is put in its place before all are written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".sits_tvm.", dir=directory) as draft:
            for name, text in files.items():
                (Path(draft) / name).write_text(text)
            for name in files:
                (Path(draft) / name).replace(directory / name)
    except OSError as error:
        message = f"cannot write {directory}: {error}"
        raise _error("output-not-writable", message, help="give another folder") from error


def _check(args: argparse.Namespace) -> int:
    config = _config(args)
    mod, params = _model(args.model)
    report = preview(mod, args.target, params, config)
    print(report.to_json() if args.json else report)
    return int(any(diagnostic.severity == "error" for diagnostic in report.diagnostics))


def _tune(args: argparse.Namespace) -> int:
    config = _config(args)
    mod, params = _model(args.model)
    options = {
        name: getattr(args, name) for name in ("runner", "trials", "time_budget", "work_dir")
    }
    progress = (lambda line: None) if args.quiet else partial(print, file=sys.stderr)
    database = tune(mod, args.target, params=params, config=config, progress=progress, **options)
    print(json.dumps({"database": str(database)}) if args.json else database)
    return 0


def _info(args: argparse.Namespace) -> int:
    print(json.dumps([asdict(row) for row in describe()], indent=1) if args.json else table())
    return 0


def _config(args: argparse.Namespace) -> Config:
    values = _read_yaml(args.config) if args.config else {}
    if args.int4 and isinstance(values, dict) and values.get("quant") is None:
        values = {**values, "quant": QuantSpec()}
    try:
        return Config.from_dict(values)
    except (ValueError, TypeError) as error:
        raise _error("config", str(error), help=CONFIG_HELP) from error


def _read_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise _error("yaml-missing", "--config needs PyYAML", help="pip install pyyaml") from error
    try:
        return yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise _error("config-not-readable", f"{path}: {error}", help=CONFIG_HELP) from error
    except yaml.YAMLError as error:
        raise _error("config-not-yaml", f"{path}: {error}", help=CONFIG_HELP) from error


def _model(path: Path) -> tuple[IRModule, dict[str, Any] | None]:
    if not path.exists():
        raise _error("model-not-found", f"{path} does not exist", help=f"MODEL is {MODEL_HELP}")
    if path.is_dir() or path.suffix == ".gguf":
        return from_pretrained(path)
    if path.suffix == ".onnx":
        return from_onnx(path)
    if path.suffix == ".pt2":
        require("torch", "reading a .pt2 program", "hf")
        return from_torch(_read(path, _load_pt2))
    if path.suffix == ".json":
        return _read(path, read_json_module), None
    raise _error("model-format", f"{path} has no known format", help=f"MODEL is {MODEL_HELP}")


def _load_pt2(path: Path) -> Any:
    from .frontends._pt2 import load_pt2

    return load_pt2(path)


def _read(path: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(path)
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
        message = f"{path}: {type(error).__name__}: {reason}"
        raise _error("model-not-readable", message, help=f"MODEL is {MODEL_HELP}") from error


def _show_progress(quiet: bool) -> None:
    """Steps that the library logs, on stderr, each with the seconds since the start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_SinceStart("[%(seconds)6.1f s] %(message)s"))
    _LOG.handlers = [handler]
    _LOG.propagate = False
    _LOG.setLevel(logging.WARNING if quiet else logging.INFO)


class _SinceStart(logging.Formatter):
    """Gives records `seconds`, counted from when the formatter was made."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.start = time.time()

    def format(self, record: logging.LogRecord) -> str:
        record.seconds = record.created - self.start
        return super().format(record)


def _fail(diagnostics: list[Diagnostic], as_json: bool) -> int:
    if as_json:
        print(json.dumps([diagnostic.to_dict() for diagnostic in diagnostics], indent=1))
    else:
        print("\n\n".join(map(str, diagnostics)), file=sys.stderr)
    return 1


def _error(code: str, message: str, *, help: str) -> SitsError:
    return SitsError([Diagnostic.error(code, message, help=help)])


if __name__ == "__main__":
    sys.exit(main())
