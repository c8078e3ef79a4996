"""4-bit weights of ONNX graphs: INT4 and UINT4 initializers that a DequantizeLinear reads, and
those of com.microsoft::MatMulNBits. Both become `R.sits.dequantize` of codes. Imports onnx.

https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html,
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from tvm import relax

from relax_passes.op.fake_quantize import dequantize
from relax_passes.packed_weights.stored_codes import StoredCodes

from ..diagnostics import Diagnostic, SitsError
from ._stored_codes import nibbles

_FOUR_BITS = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
_ADVICE = (
    "export the model with 4-bit weights in blocks, without g_idx, or in float, for "
    "Config(quant=QuantSpec())"
)
_SIZES = ("N", "K", "block_size")
Inputs = Sequence[relax.Expr | None]


def read_codes(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """The initializers that are codes, or scales and zero points of codes, by name.

    Codes have a byte each: int8 where they are signed or symmetric, else uint8. Those of
    MatMulNBits are (N, K), with scales and zero points (N, blocks).
    """
    protos = {proto.name: proto for proto in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input)
    dequantizers = [n for n in graph.node if n.op_type == "DequantizeLinear"]
    dequantizers = [n for n in dequantizers if n.input[0] in protos]
    read = Counter(name for node in dequantizers for name in (node.input[0], *node.input[2:3]))
    arrays = {  # where no one else reads them, who would take 8 bits for the width
        name: _bytes(protos[name])
        for name, count in read.items()
        if name in protos and protos[name].data_type in _FOUR_BITS and uses[name] == count
    }
    for node in dequantizers:
        if node.input[0] in arrays and node.input[1] in protos:
            _expect_finite(node, node.input[1], numpy_helper.to_array(protos[node.input[1]]))
    matmuls = [node for node in graph.node if node.op_type == "MatMulNBits"]
    read = Counter(name for node in matmuls for name in node.input[1:4])
    for node in matmuls:
        shared = [x for x in node.input[1:4] if x in protos and uses[x] != read[x]]
        if shared:
            raise _refused(node, f"other operators read {', '.join(shared)}, too")
        _read_matmul(node, protos, arrays)
    return arrays


def _bytes(proto: onnx.TensorProto) -> np.ndarray:
    signed = proto.data_type == onnx.TensorProto.INT4
    return numpy_helper.to_array(proto).astype("int8" if signed else "uint8")


def _read_matmul(
    node: onnx.NodeProto, protos: Mapping[str, onnx.TensorProto], arrays: dict[str, np.ndarray]
) -> None:
    """Add B, scales and zero points of a node to `arrays`."""
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    b, scales, zeros, g_idx = [*node.input, "", ""][1:5]
    missing = [name for name in _SIZES if name not in attrs]
    if missing:
        raise _refused(node, f"it lacks {', '.join(missing)}")
    n, k, size = (attrs[name] for name in _SIZES)
    if size < 16 or size & (size - 1):
        raise _refused(node, f"block_size={size} is no power of two from 16 on")
    if attrs.get("bits", 4) != 4 or g_idx or attrs.get("weight_prepacked"):
        raise _refused(node, f"bits={attrs.get('bits', 4)}, g_idx={g_idx or None!r}")
    computed = [name for name in (b, scales, zeros) if name and name not in protos]
    if computed:
        raise _refused(node, f"{', '.join(computed)} is no initializer")
    blocks = -(-k // size)
    raw = _shaped(node, protos[b], (n, blocks, size // 2))
    if raw.dtype != "uint8":
        raise _refused(node, f"{b} is {raw.dtype}, not uint8")
    codes = nibbles(raw.reshape(n, -1))[:, :k]
    scale = _shaped(node, protos[scales], (n, blocks))
    _expect_finite(node, scales, scale)
    zero = np.full(scale.shape, 8, "uint8")
    if zeros:
        zero = _zero_points(node, protos[zeros], n, blocks)
    weight = StoredCodes.of(np.ascontiguousarray(codes), scale, zero, size)
    parts = {b: weight.codes, scales: scale}
    if weight.zero_point is not None:
        parts[zeros] = zero
    for name, array in parts.items():
        if not np.array_equal(arrays.setdefault(name, array), array):
            raise _refused(node, f"{name} is read in another way, too")


def _shaped(node: onnx.NodeProto, proto: onnx.TensorProto, shape: tuple[int, ...]) -> np.ndarray:
    """An initializer in `shape`; the file may have joined the axes after the first, or all."""
    array = numpy_helper.to_array(proto)
    if array.shape not in (shape, (shape[0], math.prod(shape[1:])), (math.prod(shape),)):
        sizes = {attribute.name: attribute.i for attribute in node.attribute}
        given = ", ".join(f"{name}={sizes[name]}" for name in _SIZES)
        raise _refused(node, f"{proto.name} has shape {array.shape}, not {shape}, for {given}")
    return array.reshape(shape)


def _expect_finite(node: onnx.NodeProto, name: str, scale: np.ndarray) -> None:
    if not np.isfinite(scale.astype("float32")).all():
        raise _refused(node, f"its scales, {name}, hold NaN or infinite values")


def _zero_points(node: onnx.NodeProto, proto: onnx.TensorProto, n: int, blocks: int) -> np.ndarray:
    """(n, blocks) uint8, of two to a byte, or of floats that are codes."""
    if proto.data_type == onnx.TensorProto.UINT8:
        stored = _shaped(node, proto, (n, -(-blocks // 2)))
        return np.ascontiguousarray(nibbles(stored)[:, :blocks])
    zero = _shaped(node, proto, (n, blocks))
    if not np.isin(zero.astype("float32"), np.arange(16)).all():
        raise _refused(node, "a zero point is no code 0…15")
    return zero.astype("uint8")


def _refused(node: onnx.NodeProto, found: str) -> SitsError:
    message = f"{node.op_type} `{node.name or node.output[0]}`: {found}"
    return SitsError([Diagnostic.error("op-not-converted", message, help=_ADVICE)])


def matmul_n_bits(bb: relax.BlockBuilder, inputs: Inputs, attrs: Mapping[str, Any]) -> relax.Expr:
    """x @ dequantize(B).T + bias, of what `read_codes` made."""
    x, codes, scale, zero, _, bias = [*inputs, None, None, None][:6]
    assert x is not None
    assert codes is not None
    weight = dequantize(
        codes,
        scale,
        zero if str(codes.ty.dtype) == "uint8" else None,
        signed=str(codes.ty.dtype) == "int8",
        group_size=attrs["block_size"],
        out_dtype=str(x.ty.dtype),
    )
    y = bb.emit(relax.op.matmul(x, bb.emit(relax.op.permute_dims(bb.emit(weight)))))
    return y if bias is None else bb.emit(relax.op.add(y, bias))


def dequantize_linear(
    bb: relax.BlockBuilder, inputs: Inputs, attrs: Mapping[str, Any], bits: int
) -> relax.Expr:
    """Of codes of `bits` bits, in blocks or not."""
    codes, *parameters = (value for value in inputs if value is not None)
    scale, block = parameters[0], attrs.get("block_size") or None
    if block is None and (scale.ty.ndim == 0 or int(scale.ty.shape[0]) == 1):
        parameters = [bb.emit(relax.op.reshape(p, [])) for p in parameters]
    return dequantize(
        codes,
        *parameters,
        bits=bits,
        signed=str(codes.ty.dtype) == "int8",
        axis=attrs.get("axis", 1),
        group_size=block,
        out_dtype=str(scale.ty.dtype),
    )
