"""`from_onnx`: an ONNX model as a Relax module and its parameters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import tvm
from tvm import IRModule

from ..diagnostics import Diagnostic, SitsError, collect, raise_errors
from ..optional_packages import require

if TYPE_CHECKING:
    import onnx


def from_onnx(
    path_or_model: str | os.PathLike[str] | onnx.ModelProto,
) -> tuple[IRModule, dict[str, tvm.runtime.Tensor]]:
    """Import an ONNX model.

    Parameters
    ----------
    path_or_model : path or onnx.ModelProto
        External data is looked up beside the file.

    Returns
    -------
    mod : IRModule
        One function ``main``: the inputs (``num_input`` of them), then the parameters that the
        graph reads, under the names of the file. ``dim_param`` dimensions are symbolic. One output
        is returned bare, several as a tuple.
    params : dict of str to tvm.runtime.Tensor
        In the order of ``main``: initializers of rank 1 and more that are float, or over 64 KiB.
        Shapes, indices and scalars are constants. 4-bit weights (INT4, UINT4, MatMulNBits) are
        codes, a byte each, which a build packs as they are.

    Raises
    ------
    SitsError
        With every operator that has no converter and its nodes; else with the first node that
        cannot be converted; else with every value whose type differs from what ONNX infers. If the
        file is damaged, or the package onnx is missing.
    FileNotFoundError
        If there is no such file.
    """
    require("onnx", "from_onnx", "onnx")
    import onnx

    from relax_passes._import_fixes import IMPORT_FIXES

    from ._onnx_importer import Importer

    model = path_or_model
    if not isinstance(model, onnx.ModelProto):
        model = _load(Path(path_or_model))
    mod, params = Importer(model).convert()
    with collect() as found:
        mod = tvm.transform.Sequential(list(IMPORT_FIXES))(mod)
    raise_errors(found)
    return mod, params


def _load(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such ONNX file")
    try:
        return onnx.load(path)
    except (DecodeError, onnx.checker.ValidationError, OSError) as error:
        message = f"{path} cannot be read: {error}"
        raise _unreadable(message, "check that the file is complete, external data too") from error


def _unreadable(found: str, help: str) -> SitsError:
    return SitsError([Diagnostic.error("onnx-unreadable", found, help=help)])
