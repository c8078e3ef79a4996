"""Our Relax ops. Importing this package registers them, and their names in TVMScript."""

from .absmax_scale import absmax_scale
from .attention import attention
from .fake_quantize import dequantize, fake_quantize, quantize
from .take_backward import take_backward

__all__ = ["absmax_scale", "attention", "dequantize", "fake_quantize", "quantize", "take_backward"]
