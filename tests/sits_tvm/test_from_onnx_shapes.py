"""from_onnx: shapes that the graph computes of dimensions, against onnxruntime."""

import math
from fractions import Fraction

import numpy as np
import pytest
import tvm
from tvm import relax

import sits_tvm
from sits_tvm import SitsError
from sits_tvm.frontends._onnx_shapes import ShapeValues
from sits_tvm.frontends.onnx import from_onnx

onnx = pytest.importorskip("onnx")
H, TP = onnx.helper, onnx.TensorProto
NUMBERS = {"0": 0, "1": 1, "2": 2, "[-2]": [-2], "[-1]": [-1]}
NUMBERS |= {f"[{i}]": [i] for i in range(5)} | {"[0 1]": [0, 1]}

# Nodes as "Op inputs", of x (b, 3, 4), s its shape, b its first dimension as a number, and y, the
# node before; the last one gives the result.
CHAINS = {
    "one of a list": ["Gather s [0]", "Concat y [-1]", "Reshape x y"],
    "from the end": ["Gather s [-2]", "Concat [-1] y", "Reshape x y"],
    "two": ["Gather s [0 1]", "Concat y [-1]", "Reshape x y"],
    "number": ["Unsqueeze b [0]", "Concat y [-1]", "Reshape x y"],
    "slice": ["Slice s [0] [1]", "Concat y [-1]", "Reshape x y"],
    "product": ["Mul b 2", "Unsqueeze y [0]", "Concat y [-1]", "Reshape x y"],
    "list of products": ["Gather s [0]", "Mul y [2]", "Concat y [-1]", "Reshape x y"],
    "quotient": ["Gather s [0]", "Mul y [4]", "Div y [2]", "Concat y [-1]", "Reshape x y"],
    "difference": ["Gather s [0]", "Sub y [1]", "Add y [1]", "Concat y [-1]", "Reshape x y"],
    "slice of two": ["Gather s [0 1]", "Slice y [0] [1]", "Concat y [-1]", "Reshape x y"],
    "cast": ["Cast s", "Gather y [0]", "Concat y [-1]", "Reshape x y"],
    "squeeze": ["Gather s [0]", "Squeeze y", "Unsqueeze y [0]", "Concat y [-1]", "Reshape x y"],
    "copied": ["Gather s [0]", "Concat y [0] [-1]", "Reshape x y"],
    "expand": ["Gather s [0]", "Concat y [3] [4]", "Expand row y"],
    "expand to x": ["Gather s [0]", "Concat y [1] [1]", "Expand x y"],
    "fewer dimensions": ["Gather s [1]", "Concat y [1]", "Expand x y"],
    "constants": ["Gather s [0]", "Concat y [4]", "ConstantOfShape y"],
    "where": ["Concat [-1] [3] [4]", "Equal y [-1]", "Where y s [3]", "Expand cell y"],
}


def model(chains, shape=("b", 3, 4)):
    """Results are named after the chains."""
    nodes = [H.make_node("Shape", ["x"], ["s"]), H.make_node("Gather", ["s", "0"], ["b"])]
    for name, chain in chains.items():
        y = None
        for i, step in enumerate(chain):
            op, *inputs = step.replace("[0 1]", "[0_1]").split()
            inputs = [y if v == "y" else v.replace("_", " ") for v in inputs]
            y = name if i == len(chain) - 1 else f"{name} {i}"
            attrs = {"axis": 0} if op == "Concat" else {"to": TP.INT64} if op == "Cast" else {}
            nodes.append(H.make_node(op, inputs, [y], **attrs))
    arrays = {name: np.array(value, "int64") for name, value in NUMBERS.items()}
    arrays["row"] = np.arange(12, dtype="float32").reshape(1, 3, 4)
    arrays["cell"] = np.full((1, 1, 1), 7.5, "float32")
    graph = H.make_graph(
        nodes,
        "shapes",
        [H.make_tensor_value_info("x", TP.FLOAT, shape)],
        [H.make_tensor_value_info(name, TP.FLOAT, None) for name in chains],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return H.make_model(graph, opset_imports=[H.make_opsetid("", 18)], ir_version=9)


def runs(proto):
    """x -> results by onnxruntime; x -> results by our build."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(proto.SerializeToString(), options)
    mod, params = from_onnx(proto)
    ex = sits_tvm.build(mod, "llvm", params=params)
    vm = relax.VirtualMachine(ex, tvm.cpu())

    def ours(x):
        made = vm["main"](tvm.runtime.tensor(x), *ex.param_list)
        return [made] if isinstance(made, tvm.runtime.Tensor) else list(made)

    return (lambda x: session.run(None, {"x": x})), ours


def test_shapes_of_a_symbolic_dimension():
    theirs, ours = runs(model(CHAINS))
    for batch in (2, 5):
        x = np.arange(12.0 * batch, dtype="float32").reshape(batch, 3, 4)
        for name, got, want in zip(CHAINS, ours(x), theirs(x), strict=True):
            assert got.shape == want.shape, name
            np.testing.assert_array_equal(got.numpy(), want, name)


def test_expand_of_a_dimension_that_may_be_one_is_right_or_an_error():
    """TVM would read outside of x where its dimension is neither."""
    theirs, ours = runs(model({"y": ["Concat [3] [3] [4]", "Expand x y"]}))
    x = np.arange(36, dtype="float32").reshape(3, 3, 4)
    np.testing.assert_array_equal(ours(x)[0].numpy(), theirs(x)[0])
    for batch in (1, 2):
        with pytest.raises(RuntimeError, match="match_cast"):
            ours(np.zeros((batch, 3, 4), "float32"))


@pytest.mark.parametrize(
    ("chain", "found"),
    [
        (["ReduceMax x", "Cast y", "Unsqueeze y [0]", "Reshape x y"], "Reshape `y`: the graph"),
        (["Split s", "Reshape x y"], "the graph computes with a shape at Split `y 0`"),
    ],
)
def test_other_shapes_are_refused_with_the_node(chain, found):
    with pytest.raises(SitsError, match=found) as caught:
        from_onnx(model({"y": chain}))
    (error,) = caught.value.diagnostics
    assert error.code == "shape-not-followed"
    assert "onnxsim" in error.help


@pytest.mark.parametrize("a", [7, -7, 2**60 + 1, -(2**60) - 1])
@pytest.mark.parametrize("b", [2, -2, 3])
def test_integers_are_divided_towards_zero(a, b):
    operands = [relax.const(value, "int64") for value in (a, b)]
    made = ShapeValues().follow("Div", operands, {})
    assert int(made[()]) == math.trunc(Fraction(a, b))
