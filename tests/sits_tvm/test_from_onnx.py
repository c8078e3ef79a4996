"""from_onnx gives the numbers of onnxruntime, params by name, and one error for all faults."""

import sys

import numpy as np
import pytest
import tvm
from tvm import relax

from sits_tvm import SitsError
from sits_tvm.frontends.onnx import from_onnx

onnx = pytest.importorskip("onnx")
Importer = pytest.importorskip("sits_tvm.frontends._onnx_importer").Importer
H, TP = onnx.helper, onnx.TensorProto
node = H.make_node


def model(nodes, inputs, initializers, output="y", dtype=TP.FLOAT, domains=()):
    graph = H.make_graph(
        nodes,
        "graph",
        [H.make_tensor_value_info(*entry) for entry in inputs],
        [H.make_tensor_value_info(output, dtype, None)],
        [onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in initializers.items()],
    )
    opsets = [H.make_opsetid("", 17), *(H.make_opsetid(d, 1) for d in domains)]
    return H.make_model(graph, opset_imports=opsets, ir_version=9)


def agrees(proto, **feed):
    runtime = pytest.importorskip("onnxruntime")
    want = runtime.InferenceSession(proto.SerializeToString()).run(None, feed)[0]
    mod, params = from_onnx(proto)
    assert [v.name for v in mod["main"].params] == [*feed, *params]
    assert int(mod["main"].attrs["num_input"]) == len(feed)
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    got = vm["main"](*map(tvm.runtime.tensor, feed.values()), *params.values()).numpy()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    return mod, params


def floats(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


def test_gemm(rng):
    gemm = node("Gemm", ["x", "fc.weight", "fc.bias"], ["y"], transB=1, alpha=0.5, beta=2.0)
    weights = {"fc.weight": floats(rng, 4, 8), "fc.bias": floats(rng, 4)}
    proto = model([gemm], [("x", TP.FLOAT, [2, 8])], weights)
    _, params = agrees(proto, x=floats(rng, 2, 8))
    assert list(params) == ["fc.weight", "fc.bias"]


def test_last_token_of_a_matmul_keeps_odd_names(rng):
    """`onnx::w` and `/in.0` are what exporters write; the scalar index is no parameter."""
    nodes = [node("MatMul", ["/in.0", "onnx::w"], ["h"]), node("Gather", ["h", "i"], ["y"], axis=1)]
    weights = {"onnx::w": floats(rng, 8, 4), "i": np.array(-1), "unused": floats(rng, 3)}
    proto = model(nodes, [("/in.0", TP.FLOAT, ["b", 5, 8])], weights)
    _, params = agrees(proto, **{"/in.0": floats(rng, 2, 5, 8)})
    assert list(params) == ["onnx::w"]


def branch(name, op):
    outputs = [H.make_tensor_value_info(name, TP.FLOAT, None)]
    return H.make_graph([node(op, ["x"], [name])], name, [], outputs)


def test_constants_and_branches(rng):
    """Nodes that the importer has itself, not in TVM's table of converters; of their own domain."""
    two = node("Constant", [], ["two"], value=onnx.numpy_helper.from_array(np.float32(2)))
    proto = model([two, node("Mul", ["x", "two"], ["y"])], [("x", TP.FLOAT, [3])], {})
    agrees(proto, x=floats(rng, 3))
    choice = node(
        "If", ["c"], ["y"], then_branch=branch("a", "Tanh"), else_branch=branch("b", "Neg")
    )
    proto = model([choice], [("c", TP.BOOL, []), ("x", TP.FLOAT, [3])], {})
    for chosen in (True, False):
        agrees(proto, c=np.array(chosen), x=floats(rng, 3))
    proto.graph.node[0].domain = "own"
    proto.opset_import.append(H.make_opsetid("own", 1))
    with pytest.raises(SitsError, match="own::If"):
        from_onnx(proto)


def test_initializers_among_the_inputs_are_parameters(rng):
    """Files before IR version 4 list them so."""
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])], [("x", TP.FLOAT, [2, 8])], {"w": floats(rng, 8, 4)}
    )
    proto.graph.input.insert(0, H.make_tensor_value_info("w", TP.FLOAT, [8, 4]))
    mod, params = from_onnx(proto)
    assert [v.name for v in mod["main"].params] == ["x", *params] == ["x", "w"]
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    x = floats(rng, 2, 8)
    got = vm["main"](tvm.runtime.tensor(x), *params.values()).numpy()
    np.testing.assert_allclose(got, x @ params["w"].numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (node("Einsum", ["x", "w"], ["y"], equation="bij,bkj->bik"), (2, 5, 4)),
        (node("Conv", ["x", "w"], ["y"], auto_pad="SAME_LOWER", strides=[2]), (3, 3, 4)),
    ],
    ids=["Einsum", "Conv"],
)
def test_ops_that_bring_a_kernel_of_their_own(rng, made, shape):
    """TVM writes some converters in TIR, beside main."""
    proto = model([made], [("x", TP.FLOAT, [2, 3, 4])], {"w": floats(rng, *shape)})
    agrees(proto, x=floats(rng, 2, 3, 4))


@pytest.mark.parametrize("op", ["Gather", "GatherElements", "GatherND"])
def test_negative_indices_known_at_run_time(rng, op):
    index = np.array([[-1, 0], [5, -6]])
    attributes = {} if op == "GatherND" else {"axis": 0}
    index = index % 3 - 2 if op == "GatherND" else index
    proto = model(
        [node(op, ["t", "i"], ["y"], **attributes)],
        [("i", TP.INT64, ["n", 2])],
        {"t": floats(rng, 6, 3)},
    )
    agrees(proto, i=index)


def attention(rng):
    nodes = [node("MatMul", ["x", f"{n}.weight"], [f"{n}0"]) for n in "qkv"]
    for n in "qkv":
        nodes.append(node("Reshape", [f"{n}0", "heads"], [f"{n}1"]))
        nodes.append(node("Transpose", [f"{n}1"], [n], perm=[0, 2, 1, 3]))
    nodes += [
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["scores"]),
        node("Mul", ["scores", "scale"], ["scaled"]),
        node("Softmax", ["scaled"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["o"]),
        node("Transpose", ["o"], ["back"], perm=[0, 2, 1, 3]),
        node("Reshape", ["back", "flat"], ["y"]),
    ]
    weights = {f"{n}.weight": floats(rng, 8, 8) for n in "qkv"}
    shapes = {"heads": np.array([0, 0, 2, 4]), "flat": np.array([0, 0, 8])}
    weights |= {**shapes, "scale": np.float32(0.5)}
    return model(nodes, [("x", TP.FLOAT, ["b", "s", 8])], weights)


def test_attention_with_symbolic_batch_and_sequence(rng):
    _, params = agrees(attention(rng), x=floats(rng, 2, 5, 8))
    assert list(params) == ["q.weight", "k.weight", "v.weight"]


def test_reads_a_file(rng, tmp_path):
    onnx.save(attention(rng), tmp_path / "model.onnx")
    assert list(from_onnx(tmp_path / "model.onnx")[1]) == ["q.weight", "k.weight", "v.weight"]
    assert list(from_onnx(str(tmp_path / "model.onnx"))[1]) == ["q.weight", "k.weight", "v.weight"]


def test_lists_every_unsupported_node():
    nodes = [
        node("Foo", ["x"], ["a"]),
        node("Relu", ["a"], ["b"], domain="custom"),
        node("Attention", ["b", "b", "b"], ["c"]),  # ai.onnx's, not com.microsoft's
        node("Foo", ["c"], ["y"], name="last"),
    ]
    with pytest.raises(SitsError) as caught:
        from_onnx(model(nodes, [("x", TP.FLOAT, [2])], {}, domains=["custom"]))
    assert [d.message for d in caught.value.diagnostics] == [
        "Foo: no converter, 2 nodes: `a`, `last`",
        "custom::Relu: no converter, 1 node: `b`",
        "Attention: no converter, 1 node: `c`",
    ]


def test_names_the_node_that_cannot_be_converted(rng, capfd):
    nodes = [node("CumSum", ["x", "axis"], ["y"], name="running")]
    proto = model(nodes, [("x", TP.FLOAT, [2, 3]), ("axis", TP.INT64, [])], {})
    with pytest.raises(SitsError, match=r"op-not-converted.*CumSum `running`"):
        from_onnx(proto)
    assert capfd.readouterr().out == ""  # TVM prints its inputs


def test_prints_of_other_threads_are_not_lost(rng, monkeypatch):
    used, convert, before = [], Importer._convert_operator, sys.stdout

    def converted(*args):
        used.append(sys.stdout)
        return convert(*args)

    monkeypatch.setattr(Importer, "_convert_operator", converted)
    from_onnx(model([node("Relu", ["x"], ["y"])], [("x", TP.FLOAT, [2, 3])], {}))
    assert used == [before]


def test_refuses_another_type_than_onnx_says(rng):
    """The file declares an output shape that its own nodes contradict."""
    proto = model([node("Relu", ["x"], ["y"])], [("x", TP.FLOAT, [2, 3])], {})
    proto.graph.output[0].CopyFrom(H.make_tensor_value_info("y", TP.FLOAT, [2, 4]))
    with pytest.raises(SitsError, match="op-type"):
        from_onnx(proto)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "model.onnx"
    with pytest.raises(FileNotFoundError, match=r"model\.onnx"):
        from_onnx(path)
    path.write_bytes(b"not a protobuf")
    with pytest.raises(SitsError, match=r"model\.onnx cannot be read"):
        from_onnx(path)
