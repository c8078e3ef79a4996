"""QuantizeMatmulWeights: what it rewrites, what it leaves alone and why, and the numbers."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import sits_tvm
from relax_passes import QuantizeMatmulWeights
from sits_tvm import Config, QuantSpec
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report
from tir_schedules.packing import PackedLayout, pack, unpack

G32 = QuantSpec(group_size=32)


def quantize(before, **options):
    """The pass, checked not to touch its input; its diagnostics and report."""
    report, digest = Report(), tvm_ffi.structural_hash(before)
    lanes = options.pop("lanes", 1)
    config = Config(quant=options.pop("quant", G32), **options)
    with collect() as found:
        after = QuantizeMatmulWeights(config, lanes=lanes, report=report)(before)
    assert tvm_ffi.structural_hash(before) == digest
    return after, found, report


def reasons(before, **options):
    """The codes of the notes, for a module in which nothing can be quantized."""
    after, found, report = quantize(before, **options)
    assert_structural_equal(after, before)
    *notes, error = found
    assert error.code == "nothing-to-quantize"
    assert error.severity == "error"
    assert [row.reason.split(":")[0] for row in report.skipped] == [note.code for note in notes]
    assert all(note.code in error.message for note in notes)
    return [note.code for note in notes]


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
                    x, codes, scale, zero_point, n=32, k=64, lanes=16,
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
                    w, n=32, k=64, lanes=16, bits=4, group_size=32, symmetric=False,
                    scale_dtype="float16", scale_method="absmax", transposed=False,
                )  # fmt: skip
                codes = packed[0]
                scale = packed[1]
                zero_point = packed[2]
                out = (codes, scale, zero_point)
                R.output(out)
            return out

    after, found, report = quantize(
        Before, quant=QuantSpec(group_size=32, symmetric=False), lanes=16
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


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_same_numbers(rng, lanes, symmetric):
    spec = QuantSpec(group_size=32, symmetric=symmetric)
    after, _, _ = quantize(Spellings, quant=spec, lanes=lanes)
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


def test_leaves_a_weight_that_would_grow():
    """Two rows padded to 16 lanes take more bytes in INT4 than in float16."""
    mod = module_of(
        relax.TensorType((2, 384), "float16"),
        lambda bb, x, w: OP.matmul(x, bb.emit(OP.permute_dims(w))),
        relax.TensorType((4, 384), "float16"),
    )
    assert reasons(mod, lanes=16) == ["no-gain"]


def test_one_weight_read_twice_is_packed_once():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                wt = R.permute_dims(w)
                h = R.matmul(x, wt)
                y = R.matmul(h, wt)
                R.output(y)
            return y

    after, _, report = quantize(Before)
    assert len(report.quantized) == 1
    assert [argument.name for argument in after["main"].params] == ["x", "w.codes", "w.scale"]


def test_weight_that_is_also_an_output_stays():
    """A caller who gets W back must get the float W."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                h = R.matmul(x, w)
                y = (h, w)
                R.output(y)
            return y

    after, _, _ = quantize(Before)
    assert [argument.name for argument in after["main"].params] == ["x", "w", "w.codes", "w.scale"]


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


def module_of(weight_type, make, x_type=None, num_input=1):
    """main(x, w) whose result is ``make(bb, x, w)``."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", x_type or relax.TensorType((4, 64), "float32"))
    w = relax.Var("w", weight_type)
    with bb.function("main", [x, w], attrs={} if num_input is None else {"num_input": num_input}):
        with bb.dataflow():
            out = bb.emit_output(make(bb, x, w))
        bb.emit_func_output(out)
    return bb.get()


MATRIX = relax.TensorType((64, 64), "float32")
OP = relax.op


@pytest.mark.parametrize(
    ("code", "mod"),
    [
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
                relax.TensorType((64, 64), "bfloat16"),
                lambda bb, x, w: OP.matmul(x, w),
                relax.TensorType((4, 64), "bfloat16"),
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


def test_two_functions_share_a_weight():
    bb = relax.BlockBuilder()
    for name, rows in (("prefill", 8), ("decode", 1)):
        x = relax.Var("x", relax.TensorType((rows, 64), "float32"))
        w = relax.Var("w", MATRIX)
        with bb.function(name, [x, w], attrs={"num_input": 1}):
            with bb.dataflow():
                out = bb.emit_output(OP.matmul(x, w))
            bb.emit_func_output(out)
    after, _, report = quantize(bb.get())
    assert sorted(v.name_hint for v in after.get_global_vars()) == [
        "decode",
        "decode_transform_params",
        "prefill",
        "prefill_transform_params",
    ]
    assert sorted(row.function for row in report.quantized) == ["decode", "prefill"]


@pytest.mark.parametrize("n", [64, 96])
def test_a_weight_read_both_ways_is_packed_for_each(n, rng):
    """A tied autoencoder: the groups of the second product lie along the other axis."""
    mod = module_of(
        relax.TensorType((n, 64), "float32"),
        lambda bb, x, w: OP.matmul(bb.emit(OP.matmul(x, bb.emit(OP.permute_dims(w)))), w),
    )
    w, x = (rng.standard_normal(shape).astype("float32") for shape in ((n, 64), (4, 64)))
    executable = sits_tvm.build(mod, "llvm -mcpu=native", params={"w": w}, config=Config(quant=G32))
    assert [row.shape for row in executable.report.quantized] == [(n, 64), (64, n)]
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](x, *executable.param_list).numpy()
    want = x @ stored(w).T @ stored(w.T).T
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_functions_that_read_a_weight_in_two_ways_get_parts_of_their_own(rng):
    bb = relax.BlockBuilder()
    for name, turn in (("straight", OP.permute_dims), ("turned", OP.astype)):
        x, w = (relax.Var(v, MATRIX) for v in "xw")
        with bb.function(name, [x, w], attrs={"num_input": 1}):
            with bb.dataflow():
                turned = bb.emit(turn(w, None if turn is OP.permute_dims else "float32"))
                out = bb.emit_output(OP.matmul(x, turned))
            bb.emit_func_output(out)
    w, x = (rng.standard_normal((64, 64)).astype("float32") for _ in range(2))
    built = sits_tvm.build(bb.get(), "llvm -mcpu=native", params={"w": w}, config=Config(quant=G32))
    vm = relax.VirtualMachine(built, tvm.cpu())
    for name, want in (("straight", x @ stored(w).T), ("turned", x @ stored(w.T).T)):
        got = vm[name](x, *built.params_for(name)).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def stored(weight):
    """A weight (n, k) in float64 as G32 stores it."""
    return unpack(pack(weight, G32), PackedLayout(*weight.shape, G32)).astype("float64")


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_lossy_cast_makes_another_weight(dtype):
    """int8 truncates: codes of the original would be those of another product."""
    mod = module_of(
        MATRIX,
        lambda bb, x, w: OP.matmul(x, bb.emit(OP.astype(bb.emit(OP.astype(w, dtype)), "float32"))),
    )
    assert reasons(mod) == ["weight-is-computed"]


@I.ir_module
class Branches:
    """Products in branches and after them, and no dataflow block."""

    @R.function
    def main(
        c: R.Tensor((), "bool"),
        x: R.Tensor(("s", 64), "float32"),
        w: R.Tensor((64, 64), "float32"),
        v: R.Tensor((64, 64), "float32"),
    ) -> R.Tensor(("s", 64), "float32"):
        R.func_attr({"num_input": 2})
        s = T.int64()
        if c:
            y: R.Tensor((s, 64), "float32") = R.matmul(x, R.permute_dims(w))
            z: R.Tensor((s, 64), "float32") = y
        else:
            y2: R.Tensor((s, 64), "float32") = R.matmul(x, R.permute_dims(v))
            z: R.Tensor((s, 64), "float32") = y2
        u = R.matmul(z, R.permute_dims(w))
        return u


def test_reaches_into_branches(rng):
    params = {name: rng.standard_normal((64, 64)).astype("float32") for name in "wv"}
    x = rng.standard_normal((3, 64)).astype("float32")
    config = Config(quant=G32)
    built = sits_tvm.build(Branches, "llvm -mcpu=native", params=params, config=config)
    assert [row.name for row in built.report.quantized] == ["w", "v"]
    vm = relax.VirtualMachine(built, tvm.cpu())
    for condition, name in ((True, "w"), (False, "v")):
        want = x @ stored(params[name]).T @ stored(params["w"]).T
        got = vm["main"](np.array(condition), x, *built.param_list).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


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


def test_survives_json():
    after, _, _ = quantize(TiedModel, quantize_head=True, quantize_embedding=True)
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(after)), after)
