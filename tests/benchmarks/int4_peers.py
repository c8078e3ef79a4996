"""Other implementations of the product with a 4-bit weight, given the same codes and scales."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.benchmarks.int4_case import Case, Kernel
from tir_schedules.int4_format.packing import pack_nibbles


def onnxruntime_kernel(case: Case, level: int) -> Kernel:
    """MatMulNBits. Level 0 computes in float32, level 4 in int8 with float32 scales."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case.threads
    session = onnxruntime.InferenceSession(_matmul_nbits(case, level), options)
    binding = session.io_binding()
    binding.bind_cpu_input("x", case.x)
    outputs = [np.full((case.m, case.n), np.nan, "float32") for _ in range(case.layers)]
    for output, y in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_output(output.name, "cpu", 0, y.dtype, y.shape, y.ctypes.data)
    return Kernel(
        lambda: session.run_with_iobinding(binding),
        lambda: outputs[-1],
        "int8" if level == 4 else "float32",
        case.n * case.k // 2 + 4 * case.scale.size,
    )


def torch_kernel(case: Case, dtype: torch.dtype) -> Kernel:
    x = torch.tensor(case.x).to(dtype)
    weights = [torch.tensor(case.weight).to(dtype) for _ in range(case.layers)]
    y = x

    def run() -> None:
        nonlocal y
        for weight in weights:
            y = torch.nn.functional.linear(x, weight)

    return Kernel(
        run,
        lambda: y.float().numpy(),
        str(dtype).removeprefix("torch."),
        weights[0].nbytes,
    )


def _matmul_nbits(case: Case, level: int) -> bytes:
    """The layers side by side: each reads x and has an output.

    onnxruntime keeps one copy of weights that are equal, so each layer has other rows first; the
    last has those of the case.
    """
    size = case.spec.group_size
    codes = pack_nibbles(case.codes).view("uint8").reshape(case.n, -1, size // 2)
    scale = case.scale.astype("float32")
    nodes, weights, outputs = [], [], []
    for i in range(case.layers):
        for name, part in (("b", codes), ("s", scale)):
            rows = np.roll(part, i + 1 - case.layers, axis=0)
            weights.append(numpy_helper.from_array(rows, f"{name}{i}"))
        nodes.append(
            helper.make_node(
                "MatMulNBits", ["x", f"b{i}", f"s{i}"], [f"y{i}"], domain="com.microsoft",
                K=case.k, N=case.n, bits=4, block_size=size, accuracy_level=level,
            )
        )  # fmt: skip
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [case.m, case.n]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [case.m, case.k])
    graph = helper.make_graph(nodes, "layers", [x], outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
