"""INT4 from training to deployment, as an extension of Apache TVM."""

from .config import Config, QuantSpec
from .diagnostics import Diagnostic, SitsError
from .driver import build, check, lower
from .executable import Executable, load
from .frontends.onnx import from_onnx
from .frontends.pretrained import from_pretrained
from .frontends.torch import from_torch
from .report import Report
from .target import parse_target

__all__ = [
    "Config",
    "Diagnostic",
    "Executable",
    "QuantSpec",
    "Report",
    "SitsError",
    "build",
    "check",
    "from_onnx",
    "from_pretrained",
    "from_torch",
    "load",
    "lower",
    "parse_target",
]
__version__ = "0.1.0"
