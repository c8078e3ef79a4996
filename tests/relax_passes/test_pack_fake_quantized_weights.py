"""PackFakeQuantizedWeights: the values of the packed weight, what it leaves alone and why."""

import itertools

import numpy as np
import pytest
import tvm
import tvm_ffi
from quantize_reference import Grid, quantized
from tvm import relax
from tvm.ir import assert_structural_equal

import sits_tvm
from relax_passes import PackFakeQuantizedWeights
from relax_passes.op import absmax_scale, fake_quantize
from sits_tvm import Config, QuantSpec
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report
from tir_schedules.packing import PackedLayout, unpack

OP = relax.op
N, K = 24, 96


def pack(before, lanes=1):
    """The pass, checked not to touch its input; its diagnostics and report."""
    report, digest = Report(), tvm_ffi.structural_hash(before)
    with collect() as found:
        after = PackFakeQuantizedWeights(lanes=lanes, report=report)(before)
    assert tvm_ffi.structural_hash(before) == digest
    return after, found, report


def linear(
    quantizer, weight=(N, K), scale=(N, 3), zero=None, turn=True, dtype="float32", num_input=1
):
    """main(x (s, k), w, s[, z]) = x @ quantizer(w, s[, z])."""
    s = tvm.tirx.Var("s", "int64")
    bb = relax.BlockBuilder()
    args = [
        relax.Var("x", relax.TensorType((s, weight[1] if turn else weight[0]), dtype)),
        relax.Var("w", relax.TensorType(weight, dtype)),
        relax.Var("w.scale", relax.TensorType(scale, "float32")),
    ]
    if zero is not None:
        args.append(relax.Var("w.zero_point", relax.TensorType(scale, zero)))
    with bb.function("main", args, attrs={} if num_input is None else {"num_input": num_input}):
        with bb.dataflow():
            w = bb.emit(quantizer(bb, *args[1:]))
            out = bb.emit_output(OP.matmul(args[0], bb.emit(OP.permute_dims(w)) if turn else w))
        bb.emit_func_output(out)
    return bb.get()


def with_attributes(**attributes):
    return lambda bb, *args: fake_quantize(*args, **attributes)


def codes_call(func):
    (call,) = [
        b.value for b in func.body.blocks[0].bindings if "int4_matmul" in str(b.value.op.name)
    ]
    return call


def layout_in(call):
    a = call.attrs
    spec = QuantSpec(
        bits=int(a["bits"]), group_size=int(a["group_size"]), symmetric=bool(a["symmetric"]),
        scale_dtype=str(a["scale_dtype"]),
    )  # fmt: skip
    return PackedLayout(int(a["n"]), int(a["k"]), spec, int(a["lanes"]))


CASES = [
    # granularity, attributes, scale shape for (N, K), zero point dtype
    *(
        (
            {"bits": bits, "group_size": 32, "signed": zero is None, "scale_dtype": dtype},
            (N, 3),
            zero,
        )
        for bits, zero, dtype in itertools.product(
            (2, 3, 4), (None, "float32", "uint8"), (None, "float16")
        )
    ),
    ({"group_size": 64}, (N, 2), None),  # ragged
    ({"group_size": 128}, (N, 1), None),
    ({"group_size": -1, "signed": False}, (N, 1), "float32"),
    ({"axis": 0}, (N,), "int8"),
    ({"axis": 0, "signed": False}, (N,), None),
    ({"narrow_range": True}, (), None),
    ({"signed": True}, (), "int32"),
]


def draw(rng, attrs, scale_shape, zero, turn):
    """(module, values of its parameters by name, the weight (n, k) they stand for)."""
    w = rng.standard_normal((N, K)).astype("float32")
    values = [w, rng.uniform(0.05, 0.4, scale_shape).astype("float32")]
    low, high = Grid(**attrs).range
    if zero == "float32":
        values.append(rng.uniform(low - 3, high + 3, scale_shape).astype(zero))
    elif zero is not None:
        values.append(rng.integers(low, high + 1, scale_shape).astype(zero))
    want = quantized(*values, *([None] * (3 - len(values))), Grid(**attrs)).value.astype("float32")
    if not turn:
        values = [np.ascontiguousarray(v.T) if v.ndim == 2 else v for v in values]
        attrs = {**attrs, "axis": -1 - attrs.get("axis", -1) % 2}
    mod = linear(with_attributes(**attrs), values[0].shape, values[1].shape, zero, turn)
    names = ("w", "w.scale", "w.zero_point")[: len(values)]
    return mod, dict(zip(names, values, strict=True)), want


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("turn", [True, False], ids=["nk", "kn"])
@pytest.mark.parametrize(("attrs", "scale_shape", "zero"), CASES, ids=str)
def test_parts_stand_for_what_fake_quantize_returns(rng, attrs, scale_shape, zero, turn, lanes):
    """Bit for bit, for every granularity."""
    mod, params, want = draw(rng, attrs, scale_shape, zero, turn)
    after, found, report = pack(mod, lanes)
    assert found == []
    assert [row.name for row in report.quantized] == ["w"]
    layout = layout_in(codes_call(after["main"]))
    _, packed = sits_tvm.params.pack_params(after, params)
    parts = tuple(packed[f"w.{name}"].numpy() for name in layout.names)
    np.testing.assert_array_equal(unpack(parts, layout), want)


@pytest.mark.parametrize("turn", [True, False], ids=["nk", "kn"])
@pytest.mark.parametrize(("attrs", "scale_shape", "zero"), CASES[4::4], ids=str)
def test_transform_function_computes_the_same_parts(rng, attrs, scale_shape, zero, turn):
    mod, params, want = draw(rng, attrs, scale_shape, zero, turn)
    after, _, _ = pack(mod, lanes=16)
    layout = layout_in(codes_call(after["main"]))
    parts = computed_parts(after, params.values())
    np.testing.assert_array_equal(unpack(parts, layout), want)


@pytest.mark.parametrize(("given", "taken"), [((N, 1), (N,)), ((1,), ()), ((N * 3,), (N, 3))])
@pytest.mark.parametrize("constant", [False, True])
def test_a_scale_may_be_reshaped(rng, given, taken, constant):
    """As FixQuantizeGradient leaves scales that were spelled to broadcast."""
    attrs = {"axis": 1, "group_size": 32} if len(taken) == 2 else {"axis": 0, "group_size": None}
    w_value = rng.standard_normal((N, K)).astype("float32")
    scale = rng.uniform(0.05, 0.4, given).astype("float32")

    def quantizer(bb, w, s):
        w, s = (relax.const(w_value), relax.const(scale)) if constant else (w, s)
        return fake_quantize(w, bb.emit(OP.reshape(s, taken)), **attrs)

    after, found, _ = pack(linear(quantizer, scale=given))
    assert found == []
    call = codes_call(after["main"])
    layout = layout_in(call)
    if constant:
        parts = tuple(part.value.numpy() for part in call.args[1:])
    else:
        parts = computed_parts(after, [w_value, scale])
        _, packed = sits_tvm.params.pack_params(after, {"w": w_value, "w.scale": scale})
        for name, part in zip(layout.names, parts, strict=True):
            np.testing.assert_array_equal(packed[f"w.{name}"].numpy(), part)
    want = quantized(w_value, scale.reshape(taken), None, Grid(**attrs)).value
    np.testing.assert_array_equal(unpack(parts, layout), want.astype("float32"))


def test_groups_of_256_are_stored_as_two_of_128(rng):
    w = rng.standard_normal((4, 640)).astype("float32")
    scale = rng.uniform(0.05, 0.4, (4, 3)).astype("float32")
    want = quantized(w, scale, None, Grid(group_size=256)).value.astype("float32")
    after, _, _ = pack(linear(with_attributes(group_size=256), w.shape, scale.shape))
    layout = layout_in(codes_call(after["main"]))
    assert (layout.spec.group_size, layout.groups) == (128, 5)
    _, packed = sits_tvm.params.pack_params(after, {"w": w, "w.scale": scale})
    parts = tuple(packed[f"w.{name}"].numpy() for name in layout.names)
    np.testing.assert_array_equal(unpack(parts, layout), want)
    np.testing.assert_array_equal(unpack(computed_parts(after, [w, scale]), layout), want)


def computed_parts(mod, values):
    """What the transform function of a packed module returns."""
    mod = mod.clone()
    del mod["main"]
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    parts = vm["main_transform_params"]([tvm.runtime.tensor(value) for value in values])
    return tuple(part.numpy() for part in parts)


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


def test_constants_are_packed_in_place(rng):
    w, scale = rng.standard_normal((N, K)).astype("float32"), rng.uniform(0.1, 0.4, (N, 3))
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, K), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            q = bb.emit(
                fake_quantize(relax.const(w), relax.const(scale.astype("float32")), group_size=32)
            )
            out = bb.emit_output(OP.matmul(x, bb.emit(OP.permute_dims(q))))
        bb.emit_func_output(out)
    after, found, _ = pack(bb.get())
    assert found == []
    call = codes_call(after["main"])
    parts = tuple(part.value.numpy() for part in call.args[1:])
    want = quantized(w, scale.astype("float32"), None, Grid(group_size=32)).value
    np.testing.assert_array_equal(unpack(parts, layout_in(call)), want.astype("float32"))


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


def test_leaves_modules_without_quantize_ops_alone():
    mod = linear(lambda bb, w, s: OP.multiply(w, relax.const(1.0)))
    after, found, report = pack(mod)
    assert_structural_equal(after, mod)
    assert (found, report.quantized, report.skipped) == ([], [], [])


def computed_scale(bb, w, s):
    return fake_quantize(w, bb.emit(absmax_scale(w, group_size=32)), group_size=32)


def cast_first(bb, w, s):
    q = bb.emit(fake_quantize(bb.emit(OP.astype(w, "float16")), s, group_size=32))
    return OP.astype(q, "float32")


@pytest.mark.parametrize(
    ("code", "said", "mod"),
    [
        ("format-not-supported", "8 bits", linear(with_attributes(bits=8, group_size=32))),
        (
            "format-not-supported",
            "groups have 16 elements; write a multiple of 32",
            linear(with_attributes(group_size=16), scale=(N, 6)),
        ),
        (
            "format-not-supported",
            "along axis 0",
            linear(with_attributes(group_size=8, axis=0), scale=(3, K)),
        ),
        ("format-not-supported", "along axis 1", linear(with_attributes(axis=1), scale=(K,))),
        ("scale-is-computed", "convert_qat", linear(computed_scale)),
        ("weight-is-computed", "cast before", linear(cast_first)),
        (
            "not-a-weight",
            "num_input",
            linear(with_attributes(group_size=32), num_input=None),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_says_why(code, said, mod):
    after, found, report = pack(mod)
    assert_structural_equal(after, mod)
    (note,) = found
    assert (note.severity, note.code) == ("note", code)
    assert said in note.message
    assert [row.reason for row in report.skipped] == [f"{code}: {note.message.split(': ', 1)[1]}"]


def test_leaves_weights_that_are_trained():
    """A training loop passes float weights, also to the forward function."""
    mod = linear(lambda bb, w, s: fake_quantize(w, s, group_size=32))
    func = mod["main"]
    bb = relax.BlockBuilder()
    args = [relax.Var("x", relax.TensorType((2, K), "float32")), *func.params[1:]]
    with bb.function("main", args, attrs={"num_input": 1}):
        with bb.dataflow():
            q = bb.emit(fake_quantize(*args[1:], group_size=32))
            y = bb.emit(OP.matmul(args[0], bb.emit(OP.permute_dims(q))))
            out = bb.emit_output(OP.sum(y))
        bb.emit_func_output(out)
    mod = relax.transform.Gradient("main")(bb.get())
    after, found, _ = pack(mod)
    assert_structural_equal(after, mod)
    assert {note.code for note in found} == {"trained"}


@pytest.mark.parametrize(
    ("scale", "dtype", "said"),
    [
        (0.0, None, "1 of 72 scales are not positive and finite in float32, the first is 0.0"),
        (-1.0, None, "the first is -1.0 of output channel 3, group 1"),
        (np.nan, None, "the first is nan"),
        (1e-9, "float16", "in float16, the first is 0.0"),
        (1e6, "float16", "in float16, the first is inf"),
    ],
)
def test_refuses_scales_that_are_not_positive(scale, dtype, said):
    mod = linear(with_attributes(group_size=32, scale_dtype=dtype))
    scales = np.ones((N, 3), "float32")
    scales[3, 1] = scale
    params = {"w": np.ones((N, K), "float32"), "w.scale": scales}
    with pytest.raises(sits_tvm.SitsError, match=said) as error:
        sits_tvm.build(mod, "llvm -mcpu=native", params=params)
    assert error.value.diagnostics[0].code == "weight-not-quantizable"
