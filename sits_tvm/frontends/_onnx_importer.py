"""TVM's ONNX importer, made strict: all errors at once, types checked against ONNX's own.

Imports onnx.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import numpy_helper, shape_inference
from tvm import relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from ..diagnostics import Diagnostic, SitsError, emit, raise_errors
from ._onnx_codes import dequantize_linear, matmul_n_bits, read_codes
from ._onnx_shapes import SHAPE_OPERANDS, ShapeValues

_LARGE = 1 << 16
_DOMAINS = ("", "ai.onnx")
_MICROSOFT = "com.microsoft"
_CONTRIB = (
    "Attention",
    "SkipLayerNormalization",
    "EmbedLayerNormalization",
    "BiasGelu",
    "FastGelu",
)
_BUILT_IN = ("If", "Constant")
_STATIC = (
    "export with static shapes (torch.onnx.export without dynamic_shapes), or fold them first: "
    "onnxsim model.onnx out.onnx --overwrite-input-shape NAME:1,3,4"
)


class _Stop(BaseException):
    """Ends the import with an error: TVM prints a line for what is an Exception."""

    def __init__(self, error: SitsError) -> None:
        self.error = error


class Importer(ONNXGraphImporter):
    """Converts one model.

    Parameters
    ----------
    model : onnx.ModelProto
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__({}, None, keep_params_in_input=True, sanitize=False)
        self.model = model
        self._codes: list[relax.Expr] = []  # initializers that `read_codes` made
        self._shapes = ShapeValues()

    def convert(self) -> tuple[tvm.IRModule, dict[str, tvm.runtime.Tensor]]:
        opsets = {entry.domain: entry.version for entry in self.model.opset_import}
        version = opsets.get("", opsets.get("ai.onnx", 1))
        try:
            mod = self.from_onnx(self.model.graph, version)
        except _Stop as stop:
            raise stop.error from stop.__cause__
        except SitsError:
            raise
        except Exception as error:  # converters have errors of their own
            raise SitsError([self._damage(error)]) from error
        raise_errors(list(self._type_errors()))
        return self._prune(mod)

    def _damage(self, error: Exception) -> Diagnostic:
        """What is wrong with the first node that was not reached."""
        nodes = (n for n in self.model.graph.node if n.output and n.output[0] not in self._nodes)
        node = next(nodes, None)
        where = f" at {_op_name(node)} `{_label(node)}`" if node else ""
        if "ShapeExpr" in str(error):
            message = f"the graph computes with a shape{where}, which is not followed"
            return Diagnostic.error("shape-not-followed", message, help=_STATIC)
        message = f"the graph cannot be imported{where}: {type(error).__name__}: {error}"
        help_ = "check the model with onnx.checker, full_check=True"
        return Diagnostic.error("onnx-damaged", message, help=help_)

    def _prune(self, mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, tvm.runtime.Tensor]]:
        """Drop parameters that nothing reads, or that became constants on the way."""
        main = mod["main"]
        num_input = int(main.attrs["num_input"])
        inputs, weights = main.params[:num_input], main.params[num_input:]
        read = {v.name for v in relax.analysis.free_vars(main.body)}
        kept = [v for v in weights if v.name in read]
        attrs = tvm.ir.make_node("ir.DictAttrs", num_input=num_input)
        func = relax.Function([*inputs, *kept], main.body, None, bool(main.is_pure), attrs)
        func = func.with_attr("global_symbol", "main")
        out = mod.clone()  # some converters write kernels beside main
        out["main"] = func
        return out, {v.name: self._params[v.name][1] for v in kept}

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        codes = read_codes(graph)
        for proto in graph.initializer:
            if proto.name in codes:
                array = tvm.runtime.tensor(codes[proto.name])
            else:
                array = self._parse_array(proto)
            if _is_parameter(array) or (proto.name in codes and array.shape):
                var = self._new_var(proto.name, array.shape, str(array.dtype))
                self._nodes[proto.name] = var
                self._params[proto.name] = (var, array)
            else:
                self._nodes[proto.name] = relax.const(array)
            if proto.name in codes:
                self._codes.append(self._nodes[proto.name])

    def _parse_graph_input(self, graph: onnx.GraphProto) -> None:
        """Old files list their initializers among the inputs."""
        super()._parse_graph_input(graph)
        for name in self._params:
            self._inputs.pop(name, None)

    def _parse_array(self, proto: onnx.TensorProto) -> tvm.runtime.Tensor:
        try:
            return tvm.runtime.tensor(np.asarray(numpy_helper.to_array(proto), order="C"))
        except Exception as error:
            kind = onnx.TensorProto.DataType.Name(proto.data_type)
            message = f"tensor `{proto.name}` of type {kind}: {error}"
            help_ = "export the model with tensors that NumPy and ml_dtypes have a type for"
            found = Diagnostic.error("tensor-not-supported", message, help=help_)
            raise SitsError([found]) from error

    # Operators

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        missing: dict[str, list[str]] = {}
        for node in _nodes(graph):
            if not _is_supported(node):
                missing.setdefault(_op_name(node), []).append(_label(node))
        raise_errors([_unsupported(op, nodes) for op, nodes in missing.items()])

    def _convert_operator(self, op_name: str, inputs: Any, attrs: dict, opset: int) -> relax.Expr:
        try:
            if op_name == "MatMulNBits":
                return matmul_n_bits(self.bb, inputs, attrs)
            if op_name == "DequantizeLinear":
                four = any(inputs[0].same_as(codes) for codes in self._codes)
                if four or attrs.get("block_size"):
                    made = dequantize_linear(self.bb, inputs, attrs, 4 if four else 8)
                    return self.bb.normalize(made)
            elements = self._shapes.follow(op_name, inputs, attrs)
            if op_name == "Equal" and elements is not None:  # TVM's has shapes of one length
                return relax.const(elements.astype("bool"))
            if op_name in SHAPE_OPERANDS:
                self._put_shape(op_name, inputs, attrs)
            made = super()._convert_operator(op_name, inputs, attrs, opset)
            if elements is not None:
                self._shapes.remember(made, elements)
            return made
        except SitsError as error:
            raise _Stop(error) from error.__cause__
        except Exception as error:
            reason = (str(error).strip().splitlines() or [repr(error)])[-1]
            message = f"{op_name} `{attrs['tvm_custom']['name']}`: {reason}"
            help_ = "export the model with other operators or attributes"
            found = Diagnostic.error("op-not-converted", message, help=help_)
            raise _Stop(SitsError([found])) from error

    def _parse_value_proto(self, proto: Any) -> str:
        """A node without a name is called after its first output."""
        return str(super()._parse_value_proto(proto)) or _label(proto)

    def _put_shape(self, op_name: str, inputs: Any, attrs: dict) -> None:
        """In `inputs`, a shape that the graph computes becomes one."""
        if not self._shapes.put_shape(self.bb, op_name, inputs):
            message = (
                f"{op_name} `{attrs['tvm_custom']['name']}`: the graph computes its shape from "
                "values, or by nodes that are not followed (Shape, Gather, Slice, Concat, Squeeze, "
                "Unsqueeze, Reshape, Cast, Where, Equal and arithmetic are)"
            )
            raise SitsError([Diagnostic.error("shape-not-followed", message, help=_STATIC)])

    # Types

    def _type_errors(self) -> Iterator[Diagnostic]:
        """Values that were imported with another dtype or static shape than ONNX infers."""
        try:
            graph = shape_inference.infer_shapes(self.model).graph
        except Exception as error:  # over 2 GB, or a node that ONNX itself does not know
            emit(Diagnostic.note("types-not-checked", f"ONNX infers no types: {error}"))
            return
        for info in [*graph.value_info, *graph.output]:
            value, want = self._nodes.get(info.name), info.type.tensor_type
            if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
                continue
            if want.elem_type and not _agrees(value.ty, want):
                found = f"value `{info.name}` is imported as {value.ty}, ONNX says {_show(want)}"
                help_ = "check the model with onnx.checker, full_check=True"
                yield Diagnostic.error("op-type", found, help=help_)


def _is_parameter(array: tvm.runtime.Tensor) -> bool:
    is_float = "float" in str(array.dtype)
    nbytes = int(np.prod(array.shape)) * np.dtype(str(array.dtype)).itemsize if array.shape else 0
    return bool(array.shape) and (is_float or nbytes > _LARGE)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of branches and loop bodies too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _is_supported(node: onnx.NodeProto) -> bool:
    if node.op_type in _BUILT_IN:
        return node.domain in _DOMAINS
    if node.op_type in _CONTRIB:
        return node.domain == _MICROSOFT
    if node.op_type in ("Gelu", "MatMulNBits") and node.domain == _MICROSOFT:
        return True
    return node.domain in _DOMAINS and node.op_type in _get_convert_map()


def _op_name(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _label(node: onnx.NodeProto) -> str:
    return node.name or (node.output[0] if node.output else "?")


def _unsupported(op: str, nodes: list[str]) -> Diagnostic:
    shown = ", ".join(f"`{name}`" for name in nodes[:8]) + ", …" * (len(nodes) > 8)
    return Diagnostic.error(
        "op-not-supported",
        f"{op}: no converter, {len(nodes)} node{'s' * (len(nodes) > 1)}: {shown}",
        function="main",
        help="export the model with other operators",
    )


def _agrees(have: relax.TensorType, want: onnx.TypeProto.Tensor) -> bool:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(want.elem_type)).name
    if str(have.dtype) != dtype:
        return False
    if not isinstance(have.shape, relax.ShapeExpr) or not want.HasField("shape"):
        return True
    dims = want.shape.dim
    return len(have.shape) == len(dims) and all(
        not isinstance(a, tirx.IntImm) or not b.HasField("dim_value") or int(a) == b.dim_value
        for a, b in zip(have.shape, dims, strict=True)
    )


def _show(want: onnx.TypeProto.Tensor) -> str:
    dims = ", ".join(
        str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in want.shape.dim
    )
    return f"({dims}) {onnx.TensorProto.DataType.Name(want.elem_type)}"
