"""Our Relax ops. Importing this package registers them, and their names in TVMScript."""

from relax_passes.op.absmax_scale import absmax_scale
from relax_passes.op.attention import attention
from relax_passes.op.fake_quantize import dequantize, fake_quantize, quantize
from relax_passes.op.take_backward import take_backward

__all__ = ["absmax_scale", "attention", "dequantize", "fake_quantize", "quantize", "take_backward"]
