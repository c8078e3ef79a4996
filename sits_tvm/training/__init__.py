"""Training: gradients, and quantization-aware training."""

from . import _numpy_compat  # noqa: F401  TVM's Trainer with NumPy from 2.3 on
