"""The data of a GGUF tensor: its values, or the codes and scales that it is made of."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ._stored_codes import nibbles

Q4_0_BLOCK = 32
_ELEMENTS_AT_ONCE = 1 << 22


def dequantize_blocks(tensor: SimpleNamespace) -> np.ndarray:
    """float32 of the logical shape, a few rows at a time."""
    import torch
    from gguf import dequantize
    from gguf.quants import quant_shape_from_byte_shape

    shape = quant_shape_from_byte_shape(tensor.data.shape, tensor.tensor_type)
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    out = torch.empty(len(rows), shape[-1]).numpy()  # aligned to 64 bytes, unlike NumPy's
    step = max(1, _ELEMENTS_AT_ONCE // shape[-1])
    for i in range(0, len(rows), step):
        out[i : i + step] = dequantize(rows[i : i + step], tensor.tensor_type)
    return out.reshape(shape)


def q4_0_parts(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes -8…7 int8 (n, k) and scales float16 (n, k / 32).

    A block is its scale and 16 bytes, whose low nibbles are its first half; codes are stored
    plus 8.
    """
    blocks = data.reshape(len(data), -1, 2 + Q4_0_BLOCK // 2)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("float16")[:, :, 0]
    pairs = nibbles(blocks[:, :, 2:]).reshape(*blocks.shape[:2], -1, 2)
    codes = pairs.swapaxes(-1, -2).reshape(len(data), -1)
    return codes.astype("int8") - np.int8(8), scale
