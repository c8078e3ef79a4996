"""Other implementations of the product with a 4-bit weight, given the same codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
import onnxruntime
import torch
import tvm
from onnx import TensorProto, helper, numpy_helper

from sits_tvm.config import QuantSpec
from tir_schedules.int4_matmul import int4_matmul
from tir_schedules.packed_layout import PackedLayout
from tir_schedules.packing import interleave, pack_nibbles

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 3e-2}
"""Relative L2 error by the dtype that a kernel rounds its operands to.

For x with normal distribution, int8 is off by max|x| / 127 / sqrt(12): 1 % where a token of 4096
has one scale.
"""

LANES = 16
"""Of packed weights on the CPU."""
SLOW = 2e9
"""FLOP above which TVM's default lowering takes seconds."""


@dataclass(frozen=True)
class Case:
    """y (m, n) = x (m, k) @ w (n, k).T in each of `layers` layers, which lie apart in memory.

    The layers hold the same values, in tensors of their own.
    """

    m: int
    n: int
    k: int
    spec: QuantSpec
    layers: int
    threads: int

    @property
    def name(self) -> str:
        return f"M={self.m} K={self.k} N={self.n} g{self.spec.group_size}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.layers

    @cached_property
    def x(self) -> np.ndarray:
        return np.random.default_rng(1).standard_normal((self.m, self.k), "float32")

    @cached_property
    def codes(self) -> np.ndarray:
        return np.random.default_rng(2).integers(0, 16, (self.n, self.k), "uint8")

    @cached_property
    def scale(self) -> np.ndarray:
        rng = np.random.default_rng(3)
        return rng.uniform(0.005, 0.01, self._groups).astype(self.spec.scale_dtype)

    @cached_property
    def zero_point(self) -> np.ndarray:
        if self.spec.symmetric:
            return np.full(self._groups, 8, "uint8")
        return np.random.default_rng(4).integers(0, 16, self._groups, "uint8")

    @property
    def _groups(self) -> tuple[int, int]:
        return self.n, -(-self.k // self.spec.group_size)

    @cached_property
    def weight(self) -> np.ndarray:
        """w in float32, exactly."""
        zero, scale = (
            part.astype("float32").repeat(self.spec.group_size, 1)[:, : self.k]
            for part in (self.zero_point, self.scale)
        )
        return (self.codes.astype("float32") - zero) * scale

    def error(self, y: np.ndarray) -> float:
        """Relative L2 error of some rows of `y`; NaN if any element is not finite."""
        if not np.isfinite(y).all():
            return float("nan")
        rows = np.linspace(0, self.m - 1, min(self.m, 8)).astype(int)
        exact = self.x[rows].astype("float64") @ self.weight.T.astype("float64")
        return float(np.linalg.norm(y[rows] - exact) / np.linalg.norm(exact))


class NotMeasured(Exception):
    """Why a peer does not take part in a case."""


@dataclass(frozen=True)
class Kernel:
    """All layers of a case, once: what is timed."""

    run: Callable[[], object]
    result: Callable[[], np.ndarray]
    rounds_to: str
    """The dtype of `TOLERANCE` that its operands are rounded to."""
    nbytes: int = 0
    """Of the weights of a layer."""
    peak: str = ""
    """Instruction that bounds it: a key of `cpu_limits.peaks`."""
    codes: Sequence[tvm.runtime.Tensor] = ()
    """The INT4 codes of each layer, of a kernel of ours."""


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


def tvm_default_kernel(case: Case) -> Kernel:
    """What TVM makes of our PrimFunc without a schedule."""
    if case.flops > SLOW:
        raise NotMeasured("takes seconds")
    func = int4_matmul(case.m, case.n, case.k, case.spec, "float32", LANES)
    target = {"kind": "llvm", "mcpu": tvm.get_global_func("target.llvm_get_system_cpu")()}
    return tvm_kernel(case, tvm.compile(func, target=tvm.target.Target(target))["main"], "float32")


def tvm_kernel(case: Case, func: Callable[..., None], rounds_to: str, peak: str = "") -> Kernel:
    """``func(x, *parts, y)`` with the parts of the weight in the format of `packing`."""
    x, y, parts = tvm.runtime.tensor(case.x), empty(case.m, case.n), packed(case)
    layers = [tuple(map(tvm.runtime.tensor, parts)) for _ in range(case.layers)]
    nbytes = sum(part.nbytes for part in parts)
    run = lambda: [func(x, *layer, y) for layer in layers]  # noqa: E731
    return Kernel(run, y.numpy, rounds_to, nbytes, peak, [layer[0] for layer in layers])


def packed(case: Case) -> list[np.ndarray]:
    layout = PackedLayout(case.n, case.k, case.spec, LANES)
    codes = np.pad(case.codes, ((0, 0), (0, layout.padded_k - case.k)))
    rows = [pack_nibbles(codes), case.scale, pack_nibbles(case.zero_point)][: len(layout.shapes)]
    return [interleave(np.pad(part, ((0, -case.n % LANES), (0, 0))), LANES) for part in rows]


def empty(*shape: int) -> tvm.runtime.Tensor:
    """float32, all NaN: what a kernel does not write shows."""
    return tvm.runtime.tensor(np.full(shape, np.nan, "float32"))


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
