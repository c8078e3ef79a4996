"""PackFakeQuantizedWeights: what it leaves alone and why."""

import numpy as np
import pytest
from fake_quantized_linear import OP, K, N, linear, pack, with_attributes
from tvm import relax
from tvm.ir import assert_structural_equal

import sits_tvm
from relax_passes.op import absmax_scale, fake_quantize


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
            "weight-is-empty",
            "without elements",
            linear(with_attributes(axis=0), weight=(N, 0), scale=(N,)),
        ),
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


def test_names_the_scale_of_a_constant():
    w = relax.const(np.ones((N, K), "float32"))
    mod = linear(lambda bb, _, s: fake_quantize(w, s, group_size=32))
    params = {"w": np.ones((N, K), "float32"), "w.scale": np.zeros((N, 3), "float32")}
    with pytest.raises(sits_tvm.SitsError, match=r"`w\.scale`: 72 of 72 scales"):
        sits_tvm.build(mod, "llvm -mcpu=native", params=params)
