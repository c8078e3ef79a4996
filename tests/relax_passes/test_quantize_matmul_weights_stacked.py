"""QuantizeMatmulWeights: products of one input become one, with their weights stacked."""

import numpy as np
import pytest
import tvm
from quantized_matmul import G32, OP, quantize
from stacked_products import ASYMMETRIC, SIZES, close, product_in_float64, products, values_of
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.int4_format.packing import pack

QKV = ("q", "k", "v")
REASONS = {
    "tied": "its weight is read by other products, too",
    "lanes": "its 20 output channels are no multiple of 16",
    "alone": "no other weight of its input is of its dtype, orientation and kind",
    "functions": "another function reads one of these weights in another way",
}


def calls(func, name="relax.sits.int4_matmul"):
    bindings = [b for block in func.body.blocks for b in block.bindings]
    return [
        b.value for b in bindings if isinstance(b.value, relax.Call) and b.value.op.name == name
    ]


def rows(report):
    return [(row.names, row.reason) for row in report.stacked]


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_the_projections_of_grouped_query_attention(transposed):
    after, found, report = quantize(products(transposed=transposed), order="vectors")
    assert found == []
    assert [p.name for p in after["main"].params] == ["x", "q+k+v.codes", "q+k+v.scale"]
    (call,) = calls(after["main"])
    assert int(call.attrs["n"]) == sum(SIZES.values())
    parts = calls(after["main"], "relax.sits.columns")
    assert [(int(c.attrs["first"]), int(c.attrs["count"])) for c in parts] == [
        (0, 64),
        (64, 16),
        (80, 16),
    ]
    assert rows(report) == [(QKV, "")]
    assert [row.name for row in report.quantized] == list(QKV)
    assert sum(row.packed_bytes for row in report.quantized) == sum(
        int(np.prod([int(d) for d in p.ty.shape])) * tvm.DataType(str(p.ty.dtype)).bits // 8
        for p in after["main"].params[1:]
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_are_those_of_each_weight_bit_for_bit(rng, transposed, dtype, order):
    """Along the tiles: the transform function computes them, NumPy packs each weight by itself."""
    mod = products(transposed=transposed, dtype=dtype)
    after, _, _ = quantize(mod, quant=ASYMMETRIC, order=order)
    values = values_of(rng, mod)
    vm = relax.VirtualMachine(tvm.compile(after, "llvm"), tvm.cpu())
    got = vm["main_transform_params"]([tvm.runtime.tensor(value) for value in values.values()])
    weights = [value.T if transposed else value for value in values.values()]
    separate = [pack(weight, ASYMMETRIC, order) for weight in weights]
    for part, of_each in zip(got, zip(*separate, strict=True), strict=True):
        np.testing.assert_array_equal(part.numpy(), np.concatenate(of_each))


@pytest.mark.parametrize("order", ORDERS)
def test_same_numbers_without_the_rest_of_the_pipeline(rng, order):
    mod = products()
    after, _, _ = quantize(mod, order=order)
    values = values_of(rng, mod)
    x = rng.standard_normal((2, 3, 64)).astype("float32")
    vm = relax.VirtualMachine(tvm.compile(after, "llvm"), tvm.cpu())
    packed = vm["main_transform_params"]([tvm.runtime.tensor(value) for value in values.values()])
    for got, weight in zip(
        vm["main"](tvm.runtime.tensor(x), *packed), values.values(), strict=True
    ):
        close(got.numpy(), product_in_float64(x, weight, G32))


def test_stacks_constants(rng):
    values = values_of(rng, products())
    mod = relax.transform.BindParams("main", values)(products())
    after, _, report = quantize(mod, order="vectors")
    assert [v.name_hint for v in after.get_global_vars()] == ["main"]
    (call,) = calls(after["main"])
    of_each = zip(*(pack(value, G32, "vectors") for value in values.values()), strict=True)
    for part, expected in zip(call.args[1:], of_each, strict=True):
        np.testing.assert_array_equal(part.value.numpy(), np.concatenate(expected))
    assert [reason for _, reason in rows(report)] == [""]


def test_a_constant_and_an_argument_stay_apart(rng):
    values = values_of(rng, products())
    mod = relax.transform.BindParams("main", {"q": values["q"]})(products())
    _, _, report = quantize(mod, order="vectors")
    constant = next(row.name for row in report.quantized if row.name.startswith("constant"))
    assert rows(report) == [(("k", "v"), ""), ((constant,), REASONS["alone"])]


def test_stacks_per_input():
    def make(bb, x, weights, product):
        h = bb.emit(OP.nn.relu(x))
        return [
            product(given, weights[name]) for name, given in zip("abcd", (x, h, x, h), strict=False)
        ]

    _, _, report = quantize(products(dict.fromkeys("abcd", 32), make), order="vectors")
    assert rows(report) == [(("a", "c"), ""), (("b", "d"), "")]


def test_one_product_of_an_input_is_as_before():
    def make(bb, x, weights, product):
        return [product(x, weights["a"]), product(bb.emit(OP.nn.relu(x)), weights["b"])]

    after, _, report = quantize(products(dict.fromkeys("ab", 32), make), order="vectors")
    assert report.stacked == []
    assert [p.name for p in after["main"].params[1:]] == [
        "a.codes",
        "a.scale",
        "b.codes",
        "b.scale",
    ]


def test_a_tied_weight_stays_apart():
    def make(bb, x, weights, product):
        q, k, v = (product(x, weight) for weight in weights.values())
        return [q, k, product(v, weights["v"])]

    sizes = {"q": 64, "k": 64, "v": 64}
    _, _, report = quantize(products(sizes, make), order="vectors")
    assert rows(report) == [(("q", "k"), ""), (("v",), REASONS["tied"])]


def test_a_weight_in_a_group_may_also_be_an_output():
    """A caller who gets W back must get the float W."""

    def make(bb, x, weights, product):
        return [*(product(x, weight) for weight in weights.values()), weights["k"]]

    after, _, report = quantize(products(make=make), order="vectors")
    assert rows(report) == [(QKV, "")]
    assert [p.name for p in after["main"].params[1:]] == ["q+k+v.codes", "q+k+v.scale", "k"]


def test_what_is_skipped_is_not_stacked():
    after, _, report = quantize(products(), order="vectors", skip=("k",))
    assert rows(report) == [(("q", "v"), "")]
    assert [p.name for p in after["main"].params[1:]] == ["q+v.codes", "q+v.scale", "k"]


def test_output_channels_are_whole_tiles():
    _, _, report = quantize(products({"q": 64, "k": 20, "v": 32}), order="vectors")
    assert rows(report) == [(("q", "v"), ""), (("k",), REASONS["lanes"])]


def test_is_off_for_targets_without_kernels_for_it():
    after, _, report = quantize(products(), stack=False)
    assert report.stacked == []
    assert len(calls(after["main"])) == 3


def gated(activation):
    def make(bb, x, weights, product):
        gate = bb.emit(activation(product(x, weights["gate"])))
        return [bb.emit(OP.multiply(gate, product(x, weights["up"]))), product(x, weights["q"])]

    return make


@pytest.mark.parametrize(
    "activation", [OP.nn.silu, OP.nn.gelu_tanh, lambda h: OP.astype(h, "float32")]
)
def test_gate_and_up_stay_apart(activation):
    """The kernel of one multiplies by the result of the other."""
    mod = products({"gate": 32, "up": 32, "q": 32}, gated(activation))
    after, _, report = quantize(mod, order="vectors")
    (gate, up, q) = rows(report)
    assert [names for names, _ in (gate, up, q)] == [("gate",), ("up",), ("q",)]
    assert gate[1].startswith("its result meets that of another elementwise, in ")
    assert up[1] == gate[1]
    assert q[1] == REASONS["alone"]
    assert calls(after["main"], "relax.sits.columns") == []


def test_results_that_meet_in_a_product_are_stacked():
    """As do queries and keys, whose scores are of their shape where it happens to be square."""

    def make(bb, x, weights, product):
        q, k = (product(x, weight) for weight in weights.values())
        return [bb.emit(OP.matmul(q, bb.emit(OP.permute_dims(k, [0, 2, 1]))))]

    _, _, report = quantize(products({"q": 32, "k": 32}, make, rows=32), order="vectors")
    assert rows(report) == [(("q", "k"), "")]


def test_functions_that_read_weights_alike_share_the_parts():
    mod = products()
    mod["decode"] = relax.utils.copy_with_new_vars(mod["main"]).with_attr("global_symbol", "decode")
    after, _, report = quantize(mod, order="vectors")
    assert rows(report) == [(QKV, "")] * 2
    names = [[p.name for p in after[name].params[1:]] for name in ("main", "decode")]
    assert names == [["q+k+v.codes", "q+k+v.scale"]] * 2


def test_functions_that_read_a_weight_differently_stack_nothing_with_it():
    """Otherwise it would be stored twice."""

    def make(bb, x, weights, product):
        return [product(x, weights["q"])]

    mod = products()
    other = products({"q": 64}, make)["main"].with_attr("global_symbol", "queries")
    mod["queries"] = relax.utils.copy_with_new_vars(other)
    after, _, report = quantize(mod, order="vectors")
    assert rows(report) == [((name,), REASONS["functions"]) for name in QKV]
    assert [p.name for p in after["queries"].params[1:]] == ["q.codes", "q.scale"]


def test_functions_that_read_square_weights_in_both_orientations_stack_nothing():
    """The parts of x @ W.T and of x @ W would have one name."""
    sizes = {"k": 64, "v": 64}
    mod = products(sizes)
    other = products(sizes, transposed=True)["main"].with_attr("global_symbol", "back")
    mod["back"] = relax.utils.copy_with_new_vars(other)
    after, _, report = quantize(mod, order="vectors")
    assert rows(report) == [((name,), REASONS["functions"]) for name in ("k", "v") * 2]
    assert [p.name for p in after["main"].params[1::2]] == ["k.codes", "v.codes"]
    assert [p.name for p in after["back"].params[1::2]] == [
        "k.transposed.codes",
        "v.transposed.codes",
    ]


def test_is_idempotent():
    once, _, _ = quantize(products(), order="vectors")
    twice, found, report = quantize(once, order="vectors")
    assert_structural_equal(twice, once)
    assert found == report.stacked == []


def test_survives_json():
    after, _, _ = quantize(products(), order="vectors")
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(after)), after)


@I.ir_module
class Branches:
    """Each branch has a product of x of its own: they are never both computed."""

    @R.function
    def main(
        c: R.Tensor((), "bool"),
        x: R.Tensor(("s", 64), "float32"),
        a: R.Tensor((64, 64), "float32"),
        b: R.Tensor((64, 64), "float32"),
    ) -> R.Tensor(("s", 64), "float32"):
        R.func_attr({"num_input": 2})
        s = T.int64()
        if c:
            y: R.Tensor((s, 64), "float32") = R.matmul(x, a)
            z: R.Tensor((s, 64), "float32") = y
        else:
            y2: R.Tensor((s, 64), "float32") = R.matmul(x, b)
            z: R.Tensor((s, 64), "float32") = y2
        return z


def test_branches_stay_apart():
    _, _, report = quantize(Branches, order="vectors")
    assert report.stacked == []


@I.ir_module
class Bare:
    """Without a dataflow block, as the branches of an If are."""

    @R.function
    def main(
        x: R.Tensor((4, 64), "float32"),
        k: R.Tensor((16, 64), "float32"),
        v: R.Tensor((16, 64), "float32"),
    ):
        R.func_attr({"num_input": 1})
        keys = R.matmul(x, R.permute_dims(k))
        values = R.matmul(x, R.permute_dims(v))
        return (keys, values)


def test_stays_apart_where_kernels_are_not_fused():
    after, _, report = quantize(Bare)
    assert calls(after["main"], "relax.sits.columns") == []
    reason = "its block is no dataflow block, in which kernels are fused"
    assert rows(report) == [(("k",), reason), (("v",), reason)]
