"""INT4 from training to deployment, as an extension of Apache TVM."""

from .config import Config, QuantSpec
from .diagnostics import Diagnostic, SitsError
from .frontends.torch import from_torch
from .report import Report
from .target import parse_target

__all__ = ["Config", "Diagnostic", "QuantSpec", "Report", "SitsError", "from_torch", "parse_target"]
__version__ = "0.1.0"
