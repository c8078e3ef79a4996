"""PackFakeQuantizedWeights in a build: products, shared weights, and Config.quant after it."""

import numpy as np
import pytest
import tvm
from fake_quantized_linear import OP, K, N, linear, with_attributes
from quantize_reference import Grid, quantized
from tvm import relax

import sits_tvm
from relax_passes.op import fake_quantize
from sits_tvm import Config, QuantSpec


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_build_computes_the_same_product(rng, dtype):
    """sits_tvm.build packs without Config.quant; the float weight and its scale are gone."""
    mod = linear(with_attributes(group_size=32, scale_dtype="float16"), dtype=dtype)
    w, scale = rng.standard_normal((N, K)).astype(dtype), rng.uniform(0.1, 0.4, (N, 3))
    params = {"w": w, "w.scale": scale.astype("float32")}
    built = sits_tvm.build(mod, "llvm -mcpu=native", params=params)
    assert list(built.params) == ["w.codes", "w.scale"]
    assert [row.spec for row in built.report.quantized] == ["int4 g32 symmetric, float16 scales"]
    x = rng.standard_normal((5, K)).astype(dtype)
    got = relax.VirtualMachine(built, tvm.cpu())["main"](x, *built.param_list).numpy()
    stored = quantized(w, params["w.scale"], None, Grid(group_size=32, scale_dtype="float16")).value
    want = x.astype("float64") @ stored.T
    limit = {"float32": 2e-6, "float16": 1e-3}[dtype] * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def test_embedding_and_head_share_a_table(rng):
    """A tied, fake-quantized table: one set of parts, read by rows and by the last product."""
    bb = relax.BlockBuilder()
    ids = relax.Var("ids", relax.TensorType((3,), "int64"))
    table = relax.Var("table", relax.TensorType((N, K), "float32"))
    scale = relax.Var("scale", relax.TensorType((N, 3), "float32"))
    with bb.function("main", [ids, table, scale], attrs={"num_input": 1}):
        with bb.dataflow():
            q = bb.emit(fake_quantize(table, scale, group_size=32))
            h = bb.emit(OP.take(q, ids, axis=0))
            out = bb.emit_output(OP.matmul(h, bb.emit(OP.permute_dims(q))))
        bb.emit_func_output(out)
    values = {"table": rng.standard_normal((N, K)), "scale": rng.uniform(0.1, 0.4, (N, 3))}
    values = {name: value.astype("float32") for name, value in values.items()}
    built = sits_tvm.build(bb.get(), "llvm -mcpu=native", params=values)
    assert list(built.params) == ["table.codes", "table.scale"]
    indices = np.array([3, 0, 23])
    got = relax.VirtualMachine(built, tvm.cpu())["main"](indices, *built.param_list).numpy()
    q = quantized(values["table"], values["scale"], None, Grid(group_size=32)).value
    want = q[indices] @ q.T
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_a_weight_quantized_in_two_ways_has_two_sets_of_parts(rng):
    """With 4 and with 2 bits; a third product reads the first set again."""
    shapes = {"x": (5, K), "w": (N, K), "s": (N, 3)}
    args = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    bb = relax.BlockBuilder()
    with bb.function("main", args, attrs={"num_input": 1}):
        with bb.dataflow():
            four, two = (
                bb.emit(OP.permute_dims(bb.emit(fake_quantize(*args[1:], bits=b, group_size=32))))
                for b in (4, 2)
            )
            products = [bb.emit(OP.matmul(args[0], w)) for w in (four, two, four)]
            out = bb.emit_output(OP.add(bb.emit(OP.add(*products[:2])), products[2]))
        bb.emit_func_output(out)
    arrays = {
        "w": rng.standard_normal((N, K)).astype("float32"),
        "s": rng.uniform(0.1, 0.3, (N, 3)).astype("float32"),
    }
    built = sits_tvm.build(bb.get(), "llvm -mcpu=native", params=arrays)
    assert list(built.params) == ["w.codes", "w.scale", "w.2.codes", "w.2.scale"]
    x = rng.standard_normal((5, K)).astype("float32")
    four, two = (
        quantized(arrays["w"], arrays["s"], None, Grid(bits=b, group_size=32)).value for b in (4, 2)
    )
    got = relax.VirtualMachine(built, tvm.cpu())["main"](x, *built.param_list).numpy()
    np.testing.assert_allclose(got, x @ (2 * four + two).T, rtol=0, atol=2e-5)


def test_other_weights_are_quantized_after_it(rng):
    """Config.quant takes the rest; both passes make one transform function."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, K), "float32"))
    names = {"w": (K, K), "v": (K, K), "w.scale": (K, 3)}
    args = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in names.items()]
    with bb.function("main", [x, *args], attrs={"num_input": 1}):
        with bb.dataflow():
            q = bb.emit(fake_quantize(args[0], args[2], group_size=32))
            h = bb.emit(OP.matmul(x, bb.emit(OP.permute_dims(q))))
            out = bb.emit_output(OP.matmul(h, bb.emit(OP.permute_dims(args[1]))))
        bb.emit_func_output(out)
    mod, config = bb.get(), Config(quant=QuantSpec(group_size=32))
    values = {n: rng.uniform(0.1, 0.4, shape).astype("float32") for n, shape in names.items()}
    built = sits_tvm.build(mod, "llvm -mcpu=native", params=values, config=config)
    assert list(built.params) == ["w.codes", "w.scale", "v.codes", "v.scale"]
    plain = sits_tvm.build(mod, "llvm -mcpu=native", config=config)
    vm = relax.VirtualMachine(plain, tvm.cpu())
    packed = vm["main_transform_params"]([tvm.runtime.tensor(v) for v in values.values()])
    for got, want in zip(packed, built.param_list, strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_nothing_else_to_quantize_is_no_error(rng):
    mod = linear(with_attributes(group_size=32))
    params = {"w": np.ones((N, K), "float32"), "w.scale": np.ones((N, 3), "float32")}
    config = Config(quant=QuantSpec(group_size=32))
    built = sits_tvm.build(mod, "llvm -mcpu=native", params=params, config=config)
    assert [row.name for row in built.report.quantized] == ["w"]


def test_integer_activations_of_given_codes_are_said_to_stay_float(rng):
    """They are of weights that a build quantizes."""
    mod = linear(with_attributes(group_size=32))
    params = {"w": rng.standard_normal((N, K)), "w.scale": rng.uniform(0.1, 0.4, (N, 3))}
    params = {name: value.astype("float32") for name, value in params.items()}
    config = Config(quant=QuantSpec(group_size=32, activation="int8"))
    report = sits_tvm.build(mod, "llvm -mcpu=native", params=params, config=config).report
    (row,) = report.quantized
    assert "int8" not in row.spec
    assert "activation-stays-float" in {note.code for note in report.diagnostics}
