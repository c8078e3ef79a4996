"""QuantizeMatmulWeights: what it rewrites a linear layer to, and the numbers."""

import numpy as np
import pytest
import tvm
from quantized_matmul import G32, OP, module_of, quantize
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

from sits_tvm import QuantSpec
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack


def test_replaces_weight_by_its_parts():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("s", 64), "float32"), w: R.Tensor((32, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                wt = R.permute_dims(w)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor(("s", 64), "float32"),
            codes: R.Tensor((2, 8, 16), "uint32"),
            scale: R.Tensor((2, 2, 16), "float16"),
            zero_point: R.Tensor((2, 1, 16), "uint32"),
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.sits.int4_matmul(
                    x, codes, scale, zero_point, n=32, k=64, order="vectors",
                    bits=4, group_size=32, symmetric=False, scale_dtype="float16",
                )  # fmt: skip
                R.output(y)
            return y

        @R.function
        def main_transform_params(params: R.Tuple(R.Tensor((32, 64), "float32"))):
            R.func_attr({"sits.param_names": ["w"]})
            with R.dataflow():
                w = params[0]
                packed = R.sits.quantize_weight(
                    w, n=32, k=64, order="vectors", bits=4, group_size=32, symmetric=False,
                    scale_dtype="float16", scale_method="absmax", transposed=False,
                )  # fmt: skip
                codes = packed[0]
                scale = packed[1]
                zero_point = packed[2]
                out = (codes, scale, zero_point)
                R.output(out)
            return out

    after, found, report = quantize(
        Before, quant=QuantSpec(group_size=32, symmetric=False), order="vectors"
    )
    assert_structural_equal(after, Expected)
    assert found == []
    assert [argument.name for argument in after["main"].params[1:]] == [
        "w.codes",
        "w.scale",
        "w.zero_point",
    ]
    (row,) = report.quantized
    assert (row.function, row.binding, row.name, row.shape) == ("main", "y", "w", (32, 64))
    assert (row.float_bytes, row.packed_bytes) == (8192, 2 * 16 * (8 * 4 + 2 * 2 + 4))


@I.ir_module
class Spellings:
    """A linear layer as PyTorch, ONNX, GPT-2 and the nn front end write it."""

    @R.function
    def main(
        x: R.Tensor((2, 3, 64), "float32"),
        a: R.Tensor((64, 64), "float32"),
        b: R.Tensor((64, 64), "float32"),
        bias: R.Tensor((64,), "float32"),
        c: R.Tensor((64, 64), "float16"),
        d: R.Tensor((64, 64), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            flat = R.reshape(x, (6, 64))
            at = R.permute_dims(a, axes=[1, 0])
            h0 = R.matmul(flat, at)
            h1 = R.reshape(h0, (2, 3, 64))
            h2 = R.matmul(h1, b)
            h3 = R.add(h2, bias)
            wide = R.astype(c, "float32")
            ct = R.permute_dims(wide, axes=[-1, -2])
            h4 = R.matmul(h3, ct, out_dtype="float32")
            dt = R.permute_dims(d)
            dtt = R.permute_dims(dt)
            y = R.matmul(h4, dtt)
            R.output(y)
        return y


def test_finds_linear_layers_however_spelled():
    after, found, report = quantize(Spellings)
    assert found == []
    assert [row.name for row in report.quantized] == ["a", "b", "c", "d"]
    ops = [str(b.value.op.name) for b in after["main"].body.blocks[0].bindings]
    assert ops.count("relax.sits.int4_matmul") == 4
    assert "relax.matmul" not in ops
    assert "relax.permute_dims" not in ops


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_same_numbers(rng, order, symmetric):
    spec = QuantSpec(group_size=32, symmetric=symmetric)
    after, _, _ = quantize(Spellings, quant=spec, order=order)
    names = ["a", "b", "bias", "c", "d"]
    values = {
        p.name: rng.standard_normal([int(s) for s in p.ty.shape]).astype(str(p.ty.dtype))
        for p in Spellings["main"].params
    }
    vm = relax.VirtualMachine(tvm.compile(after, "llvm"), tvm.cpu())
    packed = vm["main_transform_params"]([tvm.runtime.tensor(values[name]) for name in names])
    got = vm["main"](tvm.runtime.tensor(values["x"]), *packed).numpy()

    def weight(name, transpose):
        w = values[name].T if transpose else values[name]
        return unpack(pack(w, spec), PackedLayout(64, 64, spec)).astype("float64")

    want = (
        values["x"].astype("float64") @ weight("a", False).T @ weight("b", True).T + values["bias"]
    )
    want = want @ weight("c", False).T @ weight("d", True).T
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_packs_constants_in_place(rng):
    weight = rng.standard_normal((32, 64)).astype("float32")
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 64), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            wt = bb.emit(relax.op.permute_dims(relax.const(weight)))
            y = bb.emit_output(relax.op.matmul(x, wt))
        bb.emit_func_output(y)
    after, found, _ = quantize(bb.get())
    assert found == []
    assert [v.name_hint for v in after.get_global_vars()] == ["main"]
    call = after["main"].body.blocks[0].bindings[-1].value
    for part, expected in zip(call.args[1:], pack(weight, G32), strict=True):
        np.testing.assert_array_equal(part.value.numpy(), expected)


@I.ir_module
class TiedModel:
    @R.function
    def main(
        ids: R.Tensor((1, "s"), "int64"),
        table: R.Tensor((96, 64), "float32"),
        w: R.Tensor((64, 64), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            x = R.take(table, ids, axis=0)
            wt = R.permute_dims(w)
            h = R.matmul(x, wt)
            tt = R.permute_dims(table)
            y = R.matmul(h, tt)
            R.output(y)
        return y


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, ["table", "w.codes", "w.scale"]),
        ({"quantize_head": True}, ["table", "table.codes", "table.scale", "w.codes", "w.scale"]),
        (
            {"quantize_head": True, "quantize_embedding": True},
            ["table.codes", "table.scale", "w.codes", "w.scale"],
        ),
    ],
    ids=["linear", "head", "head and embedding"],
)
def test_embedding_and_tied_head_when_asked(options, arguments):
    after, found, _ = quantize(TiedModel, **options)
    assert [argument.name for argument in after["main"].params[1:]] == arguments
    assert {note.code for note in found} == {"embedding", "head"} - {
        key.removeprefix("quantize_") for key in options
    }


def test_untied_head_is_the_last_product_onto_the_vocabulary():
    @I.ir_module
    class Before:
        @R.function
        def main(
            ids: R.Tensor((4,), "int64"),
            table: R.Tensor((64, 64), "float32"),
            w: R.Tensor((64, 64), "float32"),
            head: R.Tensor((64, 64), "float32"),
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                x = R.take(table, ids, axis=0)
                h = R.matmul(x, w)
                y = R.matmul(h, head)
                R.output(y)
            return y

    _, found, report = quantize(Before)
    assert [(note.code, note.binding) for note in found] == [("embedding", "x"), ("head", "y")]
    assert [row.name for row in report.quantized] == ["w"]


def test_skips_by_name():
    _, found, report = quantize(Spellings, skip=("[ab]",))
    assert [row.name for row in report.quantized] == ["c", "d"]
    assert [(note.code, note.message) for note in found] == [
        ("skipped", f"`{name}` stays in float: Config.skip has '[ab]'") for name in "ab"
    ]


def test_float16_product_in_float32_keeps_its_result():
    """matmul(fp16, out_dtype=float32) must not round through float16."""
    half = relax.TensorType((64, 64), "float16")
    mod = module_of(
        half,
        lambda bb, x, w: OP.matmul(x, w, out_dtype="float32"),
        relax.TensorType((4, 64), "float16"),
    )
    after, _, _ = quantize(mod)
    assert str(after["main"].ret_ty.dtype) == "float32"
    call = after["main"].body.blocks[0].bindings[-1].value
    assert str(call.args[0].ty.dtype) == "float32"


def test_survives_json():
    after, _, _ = quantize(TiedModel, quantize_head=True, quantize_embedding=True)
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(after)), after)
