"""INT4 from training to deployment, as an extension of Apache TVM."""

from ._builder_scopes import separate_scopes
from .attention_redundancy.check import check_attention_redundancy
from .config import Config, QuantSpec
from .diagnostics import Diagnostic, SitsError
from .driver import build, check, lower
from .executable import Executable, load
from .frontends.onnx import from_onnx
from .frontends.pretrained import from_pretrained
from .frontends.torch import from_torch
from .gradient_check.check import check_gradient_conservation
from .report import Report
from .target import parse_target
from .training.convert import convert_qat
from .training.differentiate import differentiate
from .training.prepare import prepare_qat
from .tuning.tune import tune

separate_scopes()

__all__ = [
    "Config",
    "Diagnostic",
    "Executable",
    "QuantSpec",
    "Report",
    "SitsError",
    "build",
    "check",
    "check_attention_redundancy",
    "check_gradient_conservation",
    "convert_qat",
    "differentiate",
    "from_onnx",
    "from_pretrained",
    "from_torch",
    "load",
    "lower",
    "parse_target",
    "prepare_qat",
    "tune",
]
__version__ = "0.1.0"
