"""QuantizeMatmulWeights: products that it leaves alone, and the reason it gives."""

import pytest
import tvm
from quantized_matmul import G32, MATRIX, OP, module_of, reasons
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from relax_passes import QuantizeMatmulWeights
from sits_tvm import Config, QuantSpec, SitsError
from sits_tvm.diagnostics import collect


def test_leaves_a_weight_that_would_grow():
    """Two rows padded to 16 lanes take more bytes in INT4 than in float16."""
    mod = module_of(
        relax.TensorType((2, 384), "float16"),
        lambda bb, x, w: OP.matmul(x, bb.emit(OP.permute_dims(w))),
        relax.TensorType((4, 384), "float16"),
    )
    assert reasons(mod, order="vectors") == ["no-gain"]


def test_says_that_one_group_is_smaller_than_padding():
    """Of 24 columns, which a group of 128 pads."""
    mod = module_of(
        relax.TensorType((10, 24), "float32"),
        lambda bb, x, w: OP.matmul(x, bb.emit(OP.permute_dims(w))),
        relax.TensorType((4, 24), "float32"),
    )
    with collect() as found:
        QuantizeMatmulWeights(Config(quant=QuantSpec()), order="vectors")(mod)
    message = found[-1].message
    assert "its (10, 24) values take 960 bytes, and 1056 packed as int4 g128" in message
    assert "(with group_size=-1, 224)" in message


def test_leaves_products_of_activations_alone():
    """They hold no weight: nothing to say, nothing to do."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 4), "float32"), y: R.Tensor((4, 4), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                a = R.add(x, x)
                b = R.add(y, y)
                z = R.matmul(a, b)
                R.output(z)
            return z

    assert reasons(Before) == []


@pytest.mark.parametrize(
    ("code", "mod"),
    [
        (
            "weight-is-empty",
            module_of(relax.TensorType((64, 0), "float32"), lambda bb, x, w: OP.matmul(x, w)),
        ),
        ("not-a-weight", module_of(MATRIX, lambda bb, x, w: OP.matmul(x, w), num_input=None)),
        (
            "weight-on-the-left",
            module_of(MATRIX, lambda bb, x, w: OP.matmul(w, bb.emit(OP.permute_dims(x)))),
        ),
        (
            "weight-is-computed",
            module_of(MATRIX, lambda bb, x, w: OP.matmul(x, bb.emit(OP.nn.relu(w)))),
        ),
        (
            "weight-is-computed",
            module_of(
                relax.TensorType((96, 64), "float32"),
                lambda bb, x, w: OP.matmul(x, bb.emit(OP.strided_slice(w, [0], [0], [64]))),
            ),
        ),
        (
            "weight-is-not-a-matrix",
            module_of(relax.TensorType((3, 64, 64), "float32"), lambda bb, x, w: OP.matmul(x, w)),
        ),
        (
            "symbolic-weight-shape",
            module_of(
                relax.TensorType((64, tvm.tirx.Var("n", "int64")), "float32"),
                lambda bb, x, w: OP.matmul(x, w),
            ),
        ),
        (
            "dtype-not-supported",
            module_of(
                relax.TensorType((64, 64), "float64"),
                lambda bb, x, w: OP.matmul(x, w),
                relax.TensorType((4, 64), "float64"),
            ),
        ),
        (
            "activation-shape-unknown",
            module_of(
                MATRIX, lambda bb, x, w: OP.matmul(x, w), relax.TensorType(dtype="float32", ndim=2)
            ),
        ),
    ],
)
def test_says_why(code, mod):
    assert reasons(mod) == [code]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_lossy_cast_makes_another_weight(dtype):
    """int8 truncates: codes of the original would be those of another product."""
    mod = module_of(
        MATRIX,
        lambda bb, x, w: OP.matmul(x, bb.emit(OP.astype(bb.emit(OP.astype(w, dtype)), "float32"))),
    )
    assert reasons(mod) == ["weight-is-computed"]


def test_leaves_a_function_that_another_calls():
    """Its caller would pass the float weight to arguments that are packed."""

    @I.ir_module
    class Before:
        @R.function
        def linear(x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.matmul(x, w)
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            R.func_attr({"num_input": 1})
            y = Before.linear(x, w)
            return y

    assert reasons(Before) == ["function-is-called"]


def test_names_that_are_taken_are_errors():
    mod = module_of(MATRIX, lambda bb, x, w: OP.matmul(x, w))
    other = relax.utils.copy_with_new_vars(mod["main"])
    mod["main_transform_params"] = other.with_attr("global_symbol", "main_transform_params")
    with collect() as found:
        QuantizeMatmulWeights(Config(quant=G32))(mod)
    assert [d.message for d in found if d.code == "name-taken"] == [
        "INT4 weights need the name `main_transform_params`, which main or another function has"
    ]


def test_another_dtype_says_how_to_import_the_model():
    double = relax.TensorType((64, 64), "float64")
    mod = module_of(double, lambda bb, x, w: OP.matmul(x, w), relax.TensorType((4, 64), "float64"))
    with pytest.raises(SitsError, match=r"from_pretrained\(…, dtype=\"float32\"\), or model.float"):
        sits_tvm.build(mod, "llvm", config=Config(quant=QuantSpec()))
