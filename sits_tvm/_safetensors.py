"""Read and write the safetensors format, without the package: a JSON header, then raw tensors.

https://github.com/huggingface/safetensors#format. Tensors are written and read one by one, so no
second copy of a model is made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm.runtime import Tensor

from .diagnostics import Diagnostic, SitsError

_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors. Raises SitsError on a dtype that the format lacks."""
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype)
        if dtype not in _CODES:
            help_ = f"the file format has {', '.join(_CODES)}"
            message = f"`{name}` is {dtype}; cannot save it"
            raise SitsError([Diagnostic.error("params-dtype", message, help=help_)])
        shape = [int(extent) for extent in tensor.shape]
        start, end = end, end + int(np.prod(shape)) * _numpy_dtype(dtype).itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.numpy()).tobytes())


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU. Raises SitsError if it is damaged."""
    tensors = {}
    try:
        with path.open("rb") as file:
            size, length = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if 8 + size > length:
                raise ValueError(f"its header has {size} bytes, the file {length}")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            _check_places(header, length - 8 - size)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                data = np.frombuffer(file.read(end - start), _numpy_dtype(_DTYPES[entry["dtype"]]))
                tensors[name] = tvm.runtime.tensor(data.reshape(entry["shape"]))
    except (OSError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError,
            TypeError, ValueError) as error:  # fmt: skip
        message = f"{path} is no readable safetensors file: {error}"
        found = Diagnostic.error("params-damaged", message, help="copy it again, or build again")
        raise SitsError([found]) from error
    return tensors


def _check_places(header: dict[str, dict[str, Any]], length: int) -> None:
    """ValueError unless tensors lie side by side in `length` bytes, as their shapes say."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        size = math.prod(entry["shape"]) * _numpy_dtype(_DTYPES[entry["dtype"]]).itemsize
        if min(entry["shape"], default=0) < 0 or (start, stop) != (end, end + size):
            raise ValueError(
                f"tensor {name} of {entry['shape']} is said to be at {start} to {stop}"
            )
        end = stop
    if end != length:
        raise ValueError(f"its tensors have {end} bytes, the file {length} for them")


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
