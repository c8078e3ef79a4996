"""PackFakeQuantizedWeights: codes that a module holds are packed as they are."""

import numpy as np
import pytest
from fake_quantized_linear import OP, K, N, codes_call, computed_parts, layout_in, pack
from tvm import relax

import sits_tvm
from relax_passes.op import dequantize
from sits_tvm.diagnostics import SitsError
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import unpack, unpack_parts

GROUP = 64  # ragged: 96 columns


def draw(rng, signed, turn):
    """Codes, scales of both signs and zero, perhaps zero points; and W[n, k] in float64."""
    low = -8 if signed else 0
    codes = rng.integers(low, low + 16, (N, K)).astype("int8" if signed else "uint8")
    scale = (rng.standard_normal((N, 2)) * rng.integers(0, 2, (N, 2))).astype("float16")
    values = [codes, scale] if signed else [codes, scale, rng.integers(0, 16, (N, 2), "uint8")]
    zero = 0 if signed else np.repeat(values[2].astype("float64"), GROUP, axis=1)[:, :K]
    want = (codes - zero) * np.repeat(scale.astype("float64"), GROUP, axis=1)[:, :K]
    return [v if turn else np.ascontiguousarray(v.T) for v in values], want


def linear(values, turn, *, constant=False, dtype="float32"):
    """main(x (5, k), codes, scale[, zero point])."""
    x = relax.Var("x", relax.TensorType((5, K), dtype))
    names = ("w", "w.scale", "w.zero_point")
    args = [
        relax.const(v) if constant else relax.Var(n, relax.TensorType(v.shape, str(v.dtype)))
        for n, v in zip(names, values, strict=False)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", [x, *([] if constant else args)], attrs={"num_input": 1}):
        with bb.dataflow():
            w = dequantize(*args, signed=len(values) == 2, axis=int(turn), group_size=GROUP,
                           out_dtype=dtype)  # fmt: skip
            w = bb.emit(w)
            out = bb.emit_output(OP.matmul(x, bb.emit(OP.permute_dims(w)) if turn else w))
        bb.emit_func_output(out)
    return bb.get(), {} if constant else dict(zip(names, values, strict=False))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("turn", [True, False], ids=["nk", "kn"])
@pytest.mark.parametrize("signed", [True, False], ids=["symmetric", "zero point"])
def test_parts_hold_the_codes(rng, signed, turn, order):
    values, want = draw(rng, signed, turn)
    mod, params = linear(values, turn)
    after, found, report = pack(mod, order)
    assert (found, [row.name for row in report.quantized]) == ([], ["w"])
    layout = layout_in(codes_call(after["main"]))
    _, packed = sits_tvm.params.pack_params(after, params)
    parts = tuple(packed[f"w.{name}"].numpy() for name in layout.names)
    np.testing.assert_array_equal(unpack(parts, layout), want.astype("float32"))
    codes = values[0] if turn else values[0].T
    stored, _, zero = unpack_parts(parts, layout)
    np.testing.assert_array_equal(stored[:, :K], codes + 8 * signed)
    assert (stored[:, K:] == (8 if zero is None else zero[:, -1:])).all()  # padding stands for 0
    computed = unpack(computed_parts(after, values), layout)
    np.testing.assert_array_equal(computed, want.astype("float32"))

    after, _, _ = pack(linear(values, turn, constant=True)[0], order)
    constants = tuple(arg.value.numpy() for arg in codes_call(after["main"]).args[1:])
    for a, b in zip(constants, parts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_codes_beyond_their_range_are_refused(rng):
    """`bits` promises 4; int8 could hold more."""
    values, _ = draw(rng, True, True)
    values[0][3, 5] = 9
    mod, params = linear(values, True)
    with pytest.raises(SitsError, match="its codes are -8…9, not -8…7"):
        sits_tvm.build(mod, "llvm", params=params)
    values[1][0, 0] = np.inf
    values[0][3, 5] = 7
    with pytest.raises(SitsError, match="1 of 48 scales are not finite"):
        sits_tvm.build(mod, "llvm", params=params)
