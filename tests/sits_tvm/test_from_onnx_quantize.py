"""from_onnx: QuantizeLinear and DequantizeLinear become one op, with onnxruntime's values."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes import FixQuantizeGradient
from sits_tvm import from_onnx

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

SHAPE = (5, 8)


def model(scale, zero, axis, opset, initializer=True):
    """y = DequantizeLinear(QuantizeLinear(x, s, z), s, z); s and z are initializers or inputs."""
    names, arrays = ["s", "z"], [scale, zero]
    names, arrays = (names, arrays) if zero is not None else (names[:1], arrays[:1])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *names], ["q"], axis=axis),
        helper.make_node("DequantizeLinear", ["q", *names], ["y"], axis=axis),
    ]
    info = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, arrays, strict=True)
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in "xy")
    constants = [numpy_helper.from_array(a, n) for n, a in zip(names, arrays, strict=True)]
    graph = helper.make_graph(
        nodes, "qdq", [x] if initializer else [x, *info], [y], constants if initializer else []
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(made)
    return made, dict(zip(names, arrays, strict=True))


ONE, PER_COLUMN = np.float32(0.25), np.linspace(0.1, 0.9, SHAPE[1]).astype("float32")
PER_ROW = np.linspace(0.1, 0.9, SHAPE[0]).astype("float32")
# name: scale, zero point, axis, opset, constants, (bits, signed)
MODELS = {
    "uint8 by default": (ONE, None, 1, 13, True, (8, False)),
    "one int8": (ONE, np.int8(3), 1, 13, True, (8, True)),
    "per column": (PER_COLUMN, np.arange(8, dtype="int8"), 1, 13, True, (8, True)),
    "per row": (PER_ROW, np.arange(5, dtype="uint8"), 0, 21, True, (8, False)),
    "arguments": (PER_COLUMN, np.arange(8, dtype="uint8"), -1, 19, False, (8, False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_pair_is_one_op(name, rng):
    scale, zero, axis, opset, constant, (bits, signed) = MODELS[name]
    made, named = model(
        np.asarray(scale), zero if zero is None else np.asarray(zero), axis, opset, constant
    )
    wide = np.asarray(scale).reshape((-1, 1) if axis == 0 else (-1,))
    ties = (rng.integers(-300, 300, SHAPE) + rng.choice([0, 0.5], SHAPE)) * wide
    x = ties.astype("float32")
    x[0, :3] = np.inf, -np.inf, -0.0
    inputs = {"x": x, **({} if constant else named)}
    (want,) = runtime.InferenceSession(made.SerializeToString()).run(None, inputs)

    mod, params = from_onnx(made)
    fixed = FixQuantizeGradient()(mod)
    calls = [b.value for block in fixed["main"].body.blocks for b in block.bindings]
    (call,) = [c for c in calls if isinstance(c, relax.Call) and "quantize" in c.op.name]
    assert call.op.name == "relax.sits.fake_quantize"
    assert (call.attrs["bits"], call.attrs["signed"]) == (bits, signed)
    vm = relax.VirtualMachine(tvm.compile(fixed, "llvm"), tvm.cpu())
    got = vm["main"](*map(tvm.runtime.tensor, inputs.values()), *params.values()).numpy()
    np.testing.assert_array_equal(got, want)
