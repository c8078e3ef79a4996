"""canonicalize_codes: weights that Relax modules unpack from integers, in functions of several."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te

import sits_tvm
from relax_passes import canonicalize_codes
from sits_tvm.diagnostics import collect

OP = relax.op
N, K, GROUP = 16, 128, 32


@pytest.fixture
def weight(rng):
    """Codes -8…7, two to a byte, scales, and W in float64."""
    codes = rng.integers(-8, 8, (N, K)).astype("int8")
    scale = rng.standard_normal((N, K // GROUP)).astype("float32")
    nibbles = (codes & 15).astype("uint8")
    values = {"codes": codes, "bytes": nibbles[:, ::2] | nibbles[:, 1::2] << 4, "scale": scale}
    return values, codes * np.repeat(scale.astype("float64"), GROUP, axis=1)


def wide(bb, scale):
    return bb.emit(OP.repeat(scale, GROUP, 1))


def floats(bb, codes, scale):
    return bb.emit(OP.multiply(bb.emit(OP.astype(codes, "float32")), wide(bb, scale)))


def nibbles(bb, packed, scale):
    """Signed by a comparison."""
    low = bb.emit(OP.bitwise_and(packed, relax.const(15, "uint8")))
    high = bb.emit(OP.right_shift(packed, relax.const(4, "uint8")))
    both = bb.emit(OP.reshape(bb.emit(OP.stack([low, high], -1)), (N, K)))
    code = bb.emit(OP.astype(both, "int8"))
    less = bb.emit(OP.subtract(code, relax.const(16, "int8")))
    high_half = bb.emit(OP.greater(code, relax.const(7, "int8")))
    return floats(bb, bb.emit(OP.where(high_half, less, code)), scale)


def dequantized(bb, codes, scale):
    """TVM's own op has no groups."""
    rows = bb.emit(OP.reshape(codes, (N * K // GROUP, GROUP)))
    flat = bb.emit(OP.reshape(scale, (N * K // GROUP,)))
    made = bb.emit(OP.dequantize(rows, flat, relax.const(0, "int8"), axis=0))
    return bb.emit(OP.reshape(made, (N, K)))


def product(bb, x, w):
    return OP.matmul(x, bb.emit(OP.permute_dims(w)))


def lookup(bb, ids, w):
    return OP.take(w, ids, axis=0)


X = relax.TensorType((3, K), "float32")
IDS = relax.TensorType((5,), "int32")


def add_function(bb, name, unpack, values, use=product, ty=X, constants=()):
    """name(x, *values), those of `constants` inside of it."""
    x = relax.Var("x", ty)
    args = {
        key: relax.const(value, str(value.dtype))
        if key in constants
        else relax.Var(key, relax.TensorType(value.shape, str(value.dtype)))
        for key, value in values.items()
    }
    weights = [arg for arg in args.values() if isinstance(arg, relax.Var)]
    with bb.function(name, [x, *weights], attrs={"num_input": 1}):
        with bb.dataflow():
            out = bb.emit_output(use(bb, x, unpack(bb, *args.values())))
        bb.emit_func_output(out)


def one_function(*args, **kwargs):
    bb = relax.BlockBuilder()
    add_function(bb, "main", *args, **kwargs)
    return bb.get()


def ran(ex, name, x):
    vm = relax.VirtualMachine(ex, tvm.cpu())
    return vm[name](tvm.runtime.tensor(x), *ex.params_for(name)).numpy()


@pytest.mark.parametrize("constant", [False, True], ids=["params", "constants"])
def test_spellings_become_products_of_their_codes(weight, rng, constant):
    values, want = weight
    bb, params = relax.BlockBuilder(), {}
    int4 = {"codes": values["codes"].astype(ml_dtypes.int4)} if constant else {}
    for name, unpack, first in (
        ("bytes", nibbles, {"bytes": values["bytes"]}),
        ("whole", floats, {"codes": values["codes"], **int4}),
        ("dequantized", dequantized, {"codes": values["codes"]}),
    ):
        used = {**first, "scale": values["scale"]}
        add_function(bb, name, unpack, used, constants=used if constant else ())
        params |= {} if constant else used
    ex = sits_tvm.build(bb.get(), "llvm", params=params)
    assert len(ex.report.quantized) == 3
    assert {row.spec for row in ex.report.quantized} == {"int4 g32 symmetric, float32 scales"}
    x = rng.standard_normal((3, K)).astype("float32")
    for name in ("bytes", "whole", "dequantized"):
        got = ran(ex, name, x)
        np.testing.assert_allclose(got, x @ want.T, rtol=0, atol=1e-5 * np.abs(x @ want.T).max())


def test_an_embedding_and_a_product_share_their_codes(weight, rng):
    values, want = weight
    params = {"codes": values["codes"], "scale": values["scale"]}
    bb = relax.BlockBuilder()
    add_function(bb, "embed", floats, params, use=lookup, ty=IDS)
    add_function(bb, "head", floats, params)
    mod = bb.get()
    after, left = canonicalize_codes(mod, params)
    assert left.keys() == {"codes.unpacked", "codes.unpacked.scale"}
    for name in ("embed", "head"):
        assert [a.name for a in after[name].params] == ["x", *left]
    ex = sits_tvm.build(mod, "llvm", params=params)
    assert [row.function for row in ex.report.quantized] == ["embed", "head"]
    ids = np.array([3, 0, 15, 3, 7], "int32")
    np.testing.assert_array_equal(ran(ex, "embed", ids), want[ids].astype("float32"))


def test_other_values_of_a_name_get_another(weight):
    """Two weights that begin with one parameter."""
    values, _ = weight
    params = {"codes": values["codes"], "scale": values["scale"]}

    def both(bb, codes, scale):
        twice = bb.emit(OP.multiply(scale, relax.const(2, "float32")))
        return floats(bb, codes, scale), floats(bb, codes, twice)

    def products(bb, x, weights):
        return OP.add(*(bb.emit(product(bb, x, w)) for w in weights))

    _, left = canonicalize_codes(one_function(both, params, use=products), params)
    scales = [value for name, value in left.items() if name.endswith(".scale")]
    assert len(left) == 4
    np.testing.assert_array_equal(scales[1], 2 * scales[0])


def test_a_value_that_is_not_known_is_said(weight):
    values, _ = weight
    used = {"codes": values["codes"], "scale": values["scale"]}
    mod = one_function(floats, used)
    with collect() as found:
        after, left = canonicalize_codes(mod, {})
    assert after.same_as(mod)
    assert left == {}
    (note,) = found
    assert note.code == "codes-not-recognised"
    assert "the value of `codes` is not known; give it in params" in note.message


def test_a_kernel_that_dequantizes_is_in_the_report(weight):
    """It could be anything."""
    values, _ = weight
    used = {"codes": values["codes"], "scale": values["scale"]}

    def kernel(bb, codes, scale):
        def computed(q, s):
            return te.compute((N, K), lambda i, j: q[i, j].astype("float32") * s[i, j // GROUP])

        return bb.emit_te(computed, codes, scale)

    ex = sits_tvm.build(one_function(kernel, used), "llvm", params=used)
    (row,) = ex.report.skipped
    assert (row.name, row.reason) == ("codes", "codes-not-recognised: R.call_tir is on the way")


def test_leaves_float_weights_and_computed_ones_alone(weight):
    _, want = weight
    mod = one_function(lambda bb, w: bb.emit(OP.multiply(w, w)), {"w": want.astype("float32")})
    with collect() as found:
        after, _ = canonicalize_codes(mod, {"w": want.astype("float32")})
    assert after.same_as(mod)
    assert found == []


def test_positions_are_no_codes():
    """As those of a rotary embedding, which are the right operand of a product."""

    def angles(bb, frequency):
        position = relax.const(np.arange(K).reshape(1, K), "int64")
        return bb.emit(OP.multiply(frequency, bb.emit(OP.astype(position, "float32"))))

    used = {"frequency": np.ones((N, 1), "float32")}
    mod = one_function(angles, used)
    with collect() as found:
        after, _ = canonicalize_codes(mod, used)
    assert after.same_as(mod)
    assert found == []


def test_wide_values_are_no_codes(weight):
    values, _ = weight
    wide_codes = {"codes": values["codes"] * np.int8(9), "scale": values["scale"]}
    mod = one_function(floats, wide_codes)
    with collect() as found:
        after, _ = canonicalize_codes(mod, wide_codes)
    assert after.same_as(mod)
    assert "its codes are -72…63, more than 4 bits" in found[0].message
