"""Small modules that several tests build."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.script import ir as I
from tvm.script import relax as R

from sits_tvm import QuantSpec
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack


@I.ir_module
class Mlp:
    """main(x (b, s, 64), up (128, 64), bias (128,), down (128, 64)), weights after one input."""

    @R.function
    def main(
        x: R.Tensor(("b", "s", 64), "float32"),
        up: R.Tensor((128, 64), "float32"),
        bias: R.Tensor((128,), "float32"),
        down: R.Tensor((128, 64), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            upt = R.permute_dims(up)
            h = R.matmul(x, upt)
            h1 = R.add(h, bias)
            h2 = R.nn.relu(h1)
            y = R.matmul(h2, down)
            R.output(y)
        return y


def mlp_params(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"up": (128, 64), "bias": (128,), "down": (128, 64)}
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}


def mlp_reference(
    x: np.ndarray, params: dict[str, np.ndarray], quant: QuantSpec | None = None
) -> np.ndarray:
    """The same in float64, with weights as `quant` stores them."""
    up = restored(params["up"], quant)
    down = restored(params["down"].T, quant).T
    return np.maximum(x.astype("float64") @ up.T + params["bias"], 0) @ down


def restored(weight: np.ndarray, quant: QuantSpec | None) -> np.ndarray:
    if quant is None:
        return weight.astype("float64")
    return unpack(pack(weight, quant), PackedLayout(*weight.shape, quant)).astype("float64")


def without_num_input(mod: IRModule) -> IRModule:
    out = mod.clone()
    out["main"] = mod["main"].without_attr("num_input")
    return out


def one_function(make, *types: relax.Type, num_input: int | None = None) -> IRModule:
    """main(a0, a1, …) with the result ``make(block_builder, *arguments)``."""
    bb = relax.BlockBuilder()
    arguments = [relax.Var(f"a{i}", ty) for i, ty in enumerate(types)]
    attrs = {} if num_input is None else {"num_input": num_input}
    with bb.function("main", arguments, attrs=attrs):
        with bb.dataflow():
            out = bb.emit_output(make(bb, *arguments))
        bb.emit_func_output(out)
    return bb.get()


def run_main(mod: IRModule, *arrays: np.ndarray) -> np.ndarray:
    """`main` compiled by TVM's own pipeline."""
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    return vm["main"](*map(tvm.runtime.tensor, arrays)).numpy()
