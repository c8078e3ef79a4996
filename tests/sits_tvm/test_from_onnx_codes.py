"""from_onnx: 4-bit weights keep their codes, and give onnxruntime's numbers."""

import numpy as np
import pytest
import tvm
from tvm import relax

import sits_tvm
from sits_tvm import Config, QuantSpec, from_onnx
from sits_tvm.diagnostics import SitsError
from sits_tvm.frontends._onnx_codes import read_codes
from tir_schedules.int4_format.packing import PackedLayout, unpack

onnx = pytest.importorskip("onnx")
H, TP = onnx.helper, onnx.TensorProto


class Graph:
    """Products of an input (3, k) with 4-bit weights of n rows; `want` has these in float64."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.nodes, self.inputs, self.initializers, self.want = [], {}, [], {}

    def add(self, name, array, dtype=None):
        array = np.asarray(array)
        if dtype is None:
            tensor = onnx.numpy_helper.from_array(array, name)
        else:
            tensor = H.make_tensor(name, dtype, array.shape, array.ravel().tolist())
        self.initializers.append(tensor)
        return name

    def x(self, k):
        self.inputs[f"x{k}"] = self.rng.standard_normal((3, k)).astype("float32")
        return f"x{k}"

    def draw(self, n, k, size, low=0, zeros=True):
        """Codes (n, k), scales of both signs (n, blocks), zero points, and the weight."""
        blocks = -(-k // size)
        codes = self.rng.integers(low, low + 16, (n, k))
        scale = self.rng.standard_normal((n, blocks)).astype("float32")
        zero = self.rng.integers(low, low + 16, (n, blocks)) if zeros else np.full(scale.shape, 8)
        wide = [np.repeat(p.astype("float64"), size, axis=1)[:, :k] for p in (scale, zero)]
        return codes, scale, zero, (codes - wide[1]) * wide[0]

    def matmul_n_bits(self, name, n, k, size, zeros="bytes", bias=False, **attrs):
        codes, scale, zero, self.want[name] = self.draw(n, k, size, zeros=zeros is not None)
        padded = np.pad(codes, ((0, 0), (0, -k % size)))
        b = pairs(padded).reshape(n, -1, size // 2)
        inputs = [self.x(k), self.add(name, b), self.add(f"{name}.s", scale.ravel())]
        if zeros is not None:
            stored = pairs(zero).ravel() if zeros == "bytes" else zero.astype("float32")
            inputs.append(self.add(f"{name}.z", stored))
        if bias:
            inputs = [*inputs, *[""] * (5 - len(inputs)), self.add(f"{name}.b", scale[:, 0])]
        attrs = {"N": n, "K": k, "bits": 4, "block_size": size, **attrs}
        node = H.make_node("MatMulNBits", inputs, [f"{name}.y"], domain="com.microsoft", **attrs)
        self.nodes.append(node)

    def dequantized(self, name, n, k, size, dtype, turn):
        """W (k, n) in blocks along axis 0, or, turned, (n, k) along axis 1."""
        low = -8 if dtype == TP.INT4 else 0
        codes, scale, zero, self.want[name] = self.draw(n, k, size, low)
        parts = [a if turn else np.ascontiguousarray(a.T) for a in (codes, scale, zero)]
        axis, block = int(turn), {"block_size": size}
        if size >= k:  # per channel
            parts[1:], axis, block = [p.ravel() for p in parts[1:]], int(not turn), {}
        dtypes, suffixes = (dtype, None, dtype), ("", ".s", ".z")
        names = [self.add(name + s, a, t) for s, a, t in zip(suffixes, parts, dtypes, strict=True)]
        self.nodes.append(H.make_node("DequantizeLinear", names, [f"{name}.w"], axis=axis, **block))
        self.nodes.append(
            H.make_node("Gemm", [self.x(k), f"{name}.w"], [f"{name}.y"], transB=int(turn))
        )

    def proto(self):
        inputs = [H.make_tensor_value_info(n, TP.FLOAT, a.shape) for n, a in self.inputs.items()]
        outputs = [H.make_tensor_value_info(f"{n}.y", TP.FLOAT, None) for n in self.want]
        graph = H.make_graph(self.nodes, "codes", inputs, outputs, self.initializers)
        opsets = [H.make_opsetid("", 21), H.make_opsetid("com.microsoft", 1)]
        return H.make_model(graph, opset_imports=opsets, ir_version=10)


def pairs(values):
    """(n, c) of 0…15 as bytes (n, ceil(c / 2)), the first in the low half."""
    padded = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    return (padded[:, ::2] | padded[:, 1::2] << 4).astype("uint8")


def whole_graph():
    graph = Graph()
    graph.matmul_n_bits("plain", 24, 80, 32, zeros=None)
    graph.matmul_n_bits("zeros", 17, 256, 128)
    graph.matmul_n_bits("odd", 5, 81, 32, bias=True)
    graph.matmul_n_bits("floats", 8, 64, 32, zeros="floats")
    graph.dequantized("int4", 8, 96, 32, TP.INT4, False)
    graph.dequantized("uint4", 8, 96, 64, TP.UINT4, True)
    graph.dequantized("channel", 8, 80, 80, TP.UINT4, False)
    graph.dequantized("rows", 12, 80, 80, TP.INT4, True)
    return graph


def test_codes_are_taken_over():
    runtime = pytest.importorskip("onnxruntime")
    graph = whole_graph()
    options = runtime.SessionOptions()  # else it quantizes the activations of these products, too
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(graph.proto().SerializeToString(), options)
    mod, params = from_onnx(graph.proto())
    ex = sits_tvm.build(mod, "llvm", params=params, config=Config(quant=QuantSpec(group_size=64)))
    rows = {row.name: row for row in ex.report.quantized}
    assert rows.keys() == graph.want.keys()
    for name, want in graph.want.items():
        layout = layout_of(rows[name])
        parts = tuple(ex.params[f"{name}.{part}"].numpy() for part in layout.names)
        np.testing.assert_array_equal(unpack(parts, layout), want.astype("float32"))
    vm = relax.VirtualMachine(ex, tvm.cpu())
    got = vm["main"](*map(tvm.runtime.tensor, graph.inputs.values()), *ex.param_list)
    for y, want in zip(got, session.run(None, graph.inputs), strict=True):
        np.testing.assert_allclose(y.numpy(), want, rtol=0, atol=1e-5 * np.abs(want).max())


def layout_of(row):
    size = -1 if "per channel" in row.spec else int(row.spec.split(" g")[1].split()[0])
    symmetric = "asymmetric" not in row.spec
    spec = QuantSpec(group_size=size, symmetric=symmetric, scale_dtype="float32")
    return PackedLayout(*row.shape, spec, "vectors")


def test_what_is_no_block_of_codes_is_refused():
    """With the node's name and what it has."""
    cases = [
        ({"bits": 8}, "bits=8"),
        ({"weight_prepacked": 1}, "bits=4"),
        ({"N": 9}, "N=9, K=64"),
    ]
    for attrs, wanted in cases:
        graph = Graph()
        graph.matmul_n_bits("w", 8, 64, 32, **attrs)
        with pytest.raises(SitsError, match=wanted):
            from_onnx(graph.proto())
    graph.nodes[0].input[1] = graph.x(64)
    with pytest.raises(SitsError, match="x64 is no initializer"):
        from_onnx(graph.proto())
    graph = Graph()
    graph.matmul_n_bits("w", 8, 64, 32)
    graph.nodes[0].input.append(graph.add("order", np.arange(64, dtype="int32")))
    with pytest.raises(SitsError, match="g_idx='order'"):
        from_onnx(graph.proto())
    graph = Graph()
    graph.matmul_n_bits("w", 8, 64, 32, zeros="floats")
    graph.initializers[-1].CopyFrom(onnx.numpy_helper.from_array(np.full(16, 7.5, "f4"), "w.z"))
    with pytest.raises(SitsError, match="a zero point is no code"):
        from_onnx(graph.proto())
    graph = Graph()
    graph.matmul_n_bits("w", 8, 64, 32)
    del graph.nodes[0].attribute[:]
    with pytest.raises(SitsError, match="it lacks N, K, block_size"):
        from_onnx(graph.proto())


def with_initializer(graph, name, array):
    """The graph, one initializer replaced."""
    proto = graph.proto()
    (found,) = (tensor for tensor in proto.graph.initializer if tensor.name == name)
    found.CopyFrom(onnx.numpy_helper.from_array(np.asarray(array), name))
    return proto


def test_only_shapes_with_one_meaning_are_read():
    """Axes of B after the first may be one, or all; no other order of its axes is guessed."""
    graph = Graph()
    graph.matmul_n_bits("w", 8, 64, 32)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in graph.proto().graph.initializer}
    b, zero = arrays["w"], arrays["w.z"]
    want = read_codes(graph.proto().graph)
    for shape in ((8, 32), (256,)):
        found = read_codes(with_initializer(graph, "w", b.reshape(shape)).graph)
        np.testing.assert_array_equal(found["w"], want["w"])
    wrong = [("w", b.transpose(1, 0, 2)), ("w", b.reshape(16, 16)), ("w", b.astype("int8"))]
    wrong += [("w.s", arrays["w.s"].reshape(2, 8)), ("w.z", zero.reshape(4, 2))]
    for name, array in wrong:
        with pytest.raises(SitsError, match=f"MatMulNBits `w.y`: {name} "):
            from_onnx(with_initializer(graph, name, array))
    graph.nodes[0].attribute[3].i = 24
    with pytest.raises(SitsError, match="block_size=24 is no power of two"):
        from_onnx(graph.proto())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused_when_they_are_read(value):
    graph = Graph()
    graph.matmul_n_bits("w", 8, 64, 32)
    graph.dequantized("v", 8, 64, 32, TP.INT4, True)
    for name, node in (("w.s", "MatMulNBits `w.y`"), ("v.s", "DequantizeLinear `v.w`")):
        (found,) = (t for t in graph.initializers if t.name == name)
        scale = onnx.numpy_helper.to_array(found).copy()
        scale.flat[3] = value
        with pytest.raises(SitsError, match=f"{node}: its scales, {name}, hold NaN"):
            from_onnx(with_initializer(graph, name, scale))


def test_blocks_of_16_stay_a_float_product_and_say_so():
    """With the right numbers; an error where INT4 is asked for, and there is nothing else."""
    graph = Graph()
    graph.matmul_n_bits("w", 24, 80, 16)
    mod, params = from_onnx(graph.proto())
    ex = sits_tvm.build(mod, "llvm", params=params)
    (row,) = ex.report.skipped
    wanted = "its groups have 16 elements; write a multiple of 32"
    assert row.reason == f"format-not-supported: {wanted}"
    (x,) = graph.inputs.values()
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](tvm.runtime.tensor(x), *ex.param_list)
    want = x @ graph.want["w"].T
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5 * np.abs(want).max())
    with pytest.raises(SitsError, match=f"nothing-to-quantize[^$]*, w: [^$]*{wanted}"):
        sits_tvm.build(mod, "llvm", params=params, config=Config(quant=QuantSpec()))


def cast_too(name):
    return H.make_node("Cast", [name], [f"{name}.cast"], to=TP.FLOAT)


def test_what_other_operators_read_too_keeps_its_own_shape_and_width():
    graph = Graph()
    graph.matmul_n_bits("w", 8, 64, 32)
    graph.nodes.append(cast_too("w"))
    with pytest.raises(SitsError, match="other operators read w, too"):
        from_onnx(graph.proto())
    graph = Graph()
    graph.dequantized("int4", 8, 96, 32, TP.INT4, False)
    assert read_codes(graph.proto().graph).keys() == {"int4", "int4.z"}
    graph.nodes.append(cast_too("int4"))
    assert read_codes(graph.proto().graph).keys() == {"int4.z"}
