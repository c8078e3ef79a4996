"""PackFakeQuantizedWeights: the values of the packed weight."""

import itertools

import numpy as np
import pytest
from fake_quantized_linear import (
    OP,
    K,
    N,
    codes_call,
    computed_parts,
    layout_in,
    linear,
    pack,
    with_attributes,
)
from quantize_reference import Grid, quantized
from tvm import relax

import sits_tvm
from relax_passes.op import fake_quantize
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import unpack

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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("turn", [True, False], ids=["nk", "kn"])
@pytest.mark.parametrize(("attrs", "scale_shape", "zero"), CASES, ids=str)
def test_parts_stand_for_what_fake_quantize_returns(rng, attrs, scale_shape, zero, turn, order):
    """Bit for bit, for every granularity."""
    mod, params, want = draw(rng, attrs, scale_shape, zero, turn)
    after, found, report = pack(mod, order)
    assert found == []
    assert [row.name for row in report.quantized] == ["w"]
    layout = layout_in(codes_call(after["main"]))
    _, packed = sits_tvm.params.pack_params(after, params)
    parts = tuple(packed[f"w.{name}"].numpy() for name in layout.names)
    np.testing.assert_array_equal(unpack(parts, layout), want)


@pytest.mark.parametrize("order", ["vectors", "fragments"])
@pytest.mark.parametrize("turn", [True, False], ids=["nk", "kn"])
@pytest.mark.parametrize(("attrs", "scale_shape", "zero"), CASES[4::4], ids=str)
def test_transform_function_computes_the_same_parts(rng, attrs, scale_shape, zero, turn, order):
    mod, params, want = draw(rng, attrs, scale_shape, zero, turn)
    after, _, _ = pack(mod, order)
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
