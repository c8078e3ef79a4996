"""GGUF files: their header, and the Hugging Face model that they hold; Q4_0 tensors as codes too.

`gguf.GGUFReader` takes half a minute for the 262 144 tokens of a Gemma tokenizer, dequantizing
whole tensors takes several times their memory, and a truncated file is a reshape error deep inside.
This reads the header in a second, tensors a few rows at a time, and says what is wrong with a file.
Names and layouts of tensors are transformers' own tables. Imports neither torch nor gguf by itself.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import numpy as np

from relax_passes.packed_weights.stored_codes import StoredCodes

from ..diagnostics import Diagnostic, SitsError, emit
from ._gguf_blocks import Q4_0_BLOCK, dequantize_blocks, q4_0_parts
from ._loaded_weights import REPORTING, refuse_incomplete, warn_unused
from ._this_thread import in_this_thread

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_AS_THEY_ARE = ("F32", "F16", "BF16", "F64")
_LOCK = threading.Lock()  # the reader of a file is put in the place of gguf's, one at a time


@dataclass
class GGUFFile:
    """The header of a GGUF file, and its tensors mapped into memory.

    Attributes
    ----------
    fields : dict of str to namespace
        Metadata: `types` (value type codes), `parts` (raw values), `data` (indices into parts).
    tensors : list of namespace
        `name`, `tensor_type`, and `data`: uint8 of shape (…, bytes per row).
    """

    path: Path
    fields: dict[str, SimpleNamespace] = field(default_factory=dict)
    tensors: list[SimpleNamespace] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.path.stat().st_size
        if size < 24:
            _refuse("gguf-damaged", self.path, f"{size} bytes are no GGUF file")
        self._bytes, self._at = np.memmap(self.path, np.uint8, mode="r"), 0
        self._view: memoryview = self._bytes.data
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            _refuse("gguf-damaged", self.path, f"the header breaks off at byte {self._at}: {error}")

    def _read_header(self) -> None:
        magic, version = self._take(4), self._number("I")
        if magic != b"GGUF":
            _refuse("gguf-damaged", self.path, f"starts with {magic!r}, a GGUF file with b'GGUF'")
        if version not in (2, 3):
            _refuse("gguf-not-supported", self.path, f"GGUF version {version}, known are 2 and 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        for _ in range(num_fields):
            name = self._string().decode()
            self.fields[name] = self._field(self._number("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        align = self._alignment()
        start = -(-self._at // align) * align
        self.tensors = [self._tensor(start, *info) for info in infos]
        self._expect_apart(infos)

    def _expect_apart(self, infos: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        """Tensors that share bytes unpack to more memory than the file has."""
        end, before = 0, ""
        places = zip(infos, self.tensors, strict=True)
        for offset, size, name in sorted((i[3], t.data.nbytes, t.name) for i, t in places):
            if size and offset < end:
                found = f"tensors {before} and {name} overlap at offset {offset}"
                _refuse("gguf-damaged", self.path, found)
            end, before = (offset + size, name) if size else (end, before)

    def _alignment(self) -> int:
        field = self.fields.get("general.alignment")
        align = field.parts[0][0] if field and len(field.parts) else 32
        if not isinstance(align, int) or align < 1:
            raise struct.error(f"general.alignment is {align!r}")
        return align

    def _field(self, kind: int) -> SimpleNamespace:
        if kind != _ARRAY:
            return SimpleNamespace(types=[kind], parts=[self._value(kind)], data=[0])
        kind, count = self._number("I"), self._number("Q")
        values: Any
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind])
            values = np.frombuffer(self._take(count * dtype.itemsize), dtype).reshape(-1, 1)
        else:
            values = [self._value(kind) for _ in range(count)]
        return SimpleNamespace(types=[_ARRAY, kind], parts=values, data=range(count))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string().decode()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Any:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if kind not in list(GGMLQuantizationType):
            _refuse("gguf-not-supported", self.path, f"tensor {name} has the unknown type {kind}")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or shape[-1] % block:
            found = (
                f"tensor {name} has shape {list(shape)}, in blocks of {block} along the last axis"
            )
            _refuse("gguf-damaged", self.path, found)
        rows = (*shape[:-1], shape[-1] // block * size)
        begin, end = start + offset, start + offset + math.prod(rows)
        if end > len(self._bytes):
            found = f"{len(self._bytes)} bytes, but tensor {name} ends at byte {end}"
            _refuse("gguf-truncated", self.path, found)
        data = self._bytes[begin:end].reshape(rows)
        return SimpleNamespace(name=name, tensor_type=GGMLQuantizationType(kind), data=data)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind} is unknown")
        return (self._number(_SCALARS[kind]),)

    def _number(self, code: str) -> Any:
        scalar = struct.Struct("<" + code)
        (value,) = scalar.unpack_from(self._view, self._at)
        self._at += scalar.size
        return value

    def _string(self) -> bytes:
        return self._take(self._number("Q"))

    def _take(self, count: int) -> bytes:
        if self._at + count > len(self._bytes):
            raise struct.error(f"{count} more bytes announced than the file has")
        self._at += count
        return bytes(self._view[self._at - count : self._at])


def load_gguf(
    path: Path, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, dict[str, StoredCodes]]:
    """The model in a GGUF file, in `dtype` (default float32), and its Q4_0 weights by name.

    A note says which quantized types are dequantized only.

    Raises
    ------
    SitsError
        For a file that is truncated, damaged or of an unknown version, an architecture or tensor
        type without support, and weights that the file lacks.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    file = GGUFFile(path)
    try:
        header = _header(file)
        _check_layers(file, header["config"])
        config = CONFIG_MAPPING[header["config"]["model_type"]].from_dict(header["config"])
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        tensors, stored = _tensors(file, skeleton, header, dtype or torch.float32)
        model, loaded = type(skeleton).from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, **REPORTING
        )
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
            ValueError) as error:  # fmt: skip
        _refuse("gguf-not-supported", path, f"{type(error).__name__}: {error}")
    refuse_incomplete(path, loaded)
    _note_dequantized(file, stored)
    return model, stored


def _header(file: GGUFFile) -> dict[str, Any]:
    """transformers' reading of the metadata: {"config": …}; of the tokenizer only its size."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    used = {
        name: value
        for name, value in file.fields.items()
        if not name.startswith("tokenizer.") or name == "tokenizer.ggml.tokens"
    }
    reader = SimpleNamespace(fields=used, tensors=file.tensors)
    with _LOCK:
        replaced = in_this_thread(lambda *_, **__: reader, gguf.GGUFReader)
        with mock.patch.object(gguf, "GGUFReader", replaced):
            return load_gguf_checkpoint(str(file.path))


def _check_layers(file: GGUFFile, config: dict[str, Any]) -> None:
    """ValueError for more layers than there are tensors; an empty model would be made of them."""
    layers = config.get("num_hidden_layers", 0)
    if not 0 <= layers <= len(file.tensors):
        raise ValueError(f"{layers} layers and {len(file.tensors)} tensors")


def _tensors(
    file: GGUFFile, skeleton: PreTrainedModel, header: dict[str, Any], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, StoredCodes]]:
    """By Hugging Face name, dequantized, one at a time in float32; and the codes of Q4_0."""
    from transformers import modeling_gguf_pytorch_utils as hf

    architecture = file.fields["general.architecture"].parts[0].decode()
    processor = hf.TENSOR_PROCESSORS.get(architecture, hf.TensorProcessor)(config=header["config"])
    names = hf.get_gguf_hf_weights_map(skeleton, processor)
    header["tensors"] = {}  # where processors put what is not one tensor for one
    stored, unused = {}, []

    def process(tensor: SimpleNamespace, weights: np.ndarray) -> Any:
        return processor.process(
            weights=weights,
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters=header,
        )

    for tensor in file.tensors:
        found = process(tensor, dequantize_blocks(tensor))
        if found.name in names:
            name = names[found.name]
            header["tensors"][name] = _aligned(found.weights).to(dtype)
            if tensor.tensor_type.name == "Q4_0" and found.weights.ndim == 2:
                codes, scale = (process(tensor, part).weights for part in q4_0_parts(tensor.data))
                weight = StoredCodes(codes, scale, None, Q4_0_BLOCK)
                if _stands_for(weight, found.weights):  # else it did more, or turned it round
                    stored[name] = weight
        elif found.name is not None:
            unused.append(tensor.name)
    warn_unused(file.path, unused)
    return header["tensors"], stored


def _stands_for(weight: StoredCodes, values: np.ndarray) -> bool:
    is_by_rows = weight.codes.shape[1] == weight.scale.shape[1] * weight.group_size
    return is_by_rows and np.array_equal(weight.dequantized(), values)


def _note_dequantized(file: GGUFFile, stored: Mapping[str, StoredCodes]) -> None:
    """Which types are not taken over as codes."""
    kinds = Counter(t.tensor_type.name for t in file.tensors)
    kinds["Q4_0"] -= len(stored)
    kinds = +kinds
    found = [f"{kind} ({count})" for kind, count in kinds.items() if kind not in _AS_THEY_ARE]
    if found:
        message = (
            f"{file.path.name}: tensors in {', '.join(found)} are dequantized, and rounded again "
            "where Config.quant asks for INT4; only rows of Q4_0 are taken over: other types have "
            "more bits, or, as Q4_K, minima that are no codes times the scale"
        )
        emit(Diagnostic.note("gguf-dequantized", message))


def _aligned(array: np.ndarray) -> torch.Tensor:
    """A tensor at an address that TVM takes without a copy; the array's own where it can be."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.clone() if tensor.data_ptr() % 64 else tensor


def _refuse(code: str, path: Path, found: str) -> NoReturn:
    raise SitsError([Diagnostic.error(code, f"{path}: {found}", help=_HELP[code])])


_HELP = {
    "gguf-damaged": "download the file again; other formats go in as a directory with config.json",
    "gguf-truncated": "the download or copy was cut off: fetch the file again",
    "gguf-not-supported": "pass the model as a directory with config.json and safetensors",
}
