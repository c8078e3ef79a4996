"""StoreColumns: a product writes the columns that its readers take, with what they compute."""

import numpy as np
import pytest
import tvm
from quantized_matmul import G32, OP
from small_modules import restored
from stacked_products import SIZES, close, products, values_of
from tvm import relax
from tvm.ir import assert_structural_equal

from relax_passes import QuantizeMatmulWeights, StoreColumns
from relax_passes.op.columns import columns
from sits_tvm import Config, QuantSpec, parse_target
from sits_tvm.pipeline import run_kernel_passes
from sits_tvm.report import Report

CPU = parse_target("llvm -mcpu=native")
ROWS = [1, 3, 40]


def of_a_product(follow, parts=((0, 16), (16, 32)), *, right="kn", rows=None):
    """main(x (s, 8), w, bias (48,)) of ``follow(bb, columns, bias)`` for each of the `parts`."""
    bb = relax.BlockBuilder()
    s = tvm.tirx.Var("s", "int64") if rows is None else rows
    x = relax.Var("x", relax.TensorType((s, 8), "float32"))
    w = relax.Var("w", relax.TensorType((8, 48) if right == "kn" else (48, 8), "float32"))
    biases = [relax.Var(f"b{n}", relax.TensorType((n,), "float32")) for _, n in parts]
    with bb.function("main", [x, w, *biases], attrs={"num_input": 2 + len(biases)}):
        with bb.dataflow():
            y = bb.emit(OP.matmul(x, w if right == "kn" else bb.emit(OP.permute_dims(w))))
            results = [
                follow(bb, bb.emit(columns(y, first=first, count=count)), bias, y)
                for (first, count), bias in zip(parts, biases, strict=True)
            ]
            out = bb.emit_output(relax.Tuple(results))
        bb.emit_func_output(out)
    return bb.get()


def built(mod):
    """The module's kernels, and a function of arrays."""
    lowered = run_kernel_passes(mod, CPU, Config(), report := Report())
    vm = relax.VirtualMachine(relax.build(lowered, CPU), tvm.cpu())
    return report.kernels, lambda *args: [out.numpy() for out in vm["main"](*args)]


def arrays(rng, mod, rows):
    return [
        rng.standard_normal(
            [rows if not hasattr(d, "value") else int(d) for d in p.ty.shape]
        ).astype("float32")
        for p in mod["main"].params
    ]


def add_bias(bb, part, bias, _):
    return bb.emit(OP.nn.relu(bb.emit(OP.add(part, bias))))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("right", ["kn", "nk"])
def test_one_kernel_has_the_same_numbers(rng, right, rows):
    """Of one row and more, and of both orders of the weight."""
    mod = of_a_product(add_bias, right=right)
    (kernel,), run = built(mod)
    assert kernel.family == "Matmul"
    x, w, *biases = arrays(rng, mod, rows)
    want = x.astype("float64") @ (w if right == "kn" else w.T)
    got = run(x, w, *biases)
    for part, (first, count), bias in zip(got, ((0, 16), (16, 32)), biases, strict=True):
        close(part, np.maximum(want[:, first : first + count] + bias, 0))


@pytest.mark.parametrize("parts", [((16, 16), (16, 32)), ((16, 32),)])
def test_columns_may_overlap_or_be_left_out(rng, parts):
    mod = of_a_product(lambda bb, part, *_: part, parts)
    (_,), run = built(mod)
    x, w, *biases = arrays(rng, mod, 5)
    for part, (first, count) in zip(run(x, w, *biases), parts, strict=True):
        close(part, (x.astype("float64") @ w)[:, first : first + count])


def test_kernels_that_read_other_arguments_are_others(rng):
    """Products of one shape, whose parts share two biases each in its way."""
    bb = relax.BlockBuilder()
    matrix, vector = relax.TensorType((8, 48), "float32"), relax.TensorType((16,), "float32")
    x = relax.Var("x", relax.TensorType((3, 8), "float32"))
    weights = [relax.Var(name, matrix) for name in ("w", "u")]
    biases = [relax.Var(name, vector) for name in ("a", "b")]
    with bb.function("main", [x, *weights, *biases], attrs={"num_input": 5}):
        with bb.dataflow():
            results = []
            for weight, read in zip(weights, ((0, 0, 1), (0, 1, 1)), strict=True):
                y = bb.emit(OP.matmul(x, weight))
                for first, bias in zip((0, 16, 32), read, strict=True):
                    part = bb.emit(columns(y, first=first, count=16))
                    results.append(add_bias(bb, part, biases[bias], y))
            out = bb.emit_output(relax.Tuple(results))
        bb.emit_func_output(out)
    mod = bb.get()
    kernels, run = built(mod)
    assert len(kernels) == 2
    x, w, u, a, b = arrays(rng, mod, 3)
    products = [x.astype("float64") @ weight for weight in (w, u)]
    parts = [y[:, first : first + 16] for y in products for first in (0, 16, 32)]
    for got, part, bias in zip(run(x, w, u, a, b), parts, (a, a, b, a, b, b), strict=True):
        close(got, np.maximum(part + bias, 0))


def reads_all(bb, part, bias, y):
    return bb.emit(OP.concat([part, y], axis=1))


def adds_what_is_later(bb, part, bias, y):
    later = bb.emit(OP.nn.softmax(bias))
    return bb.emit(OP.add(part, later))


@pytest.mark.parametrize(
    ("follow", "parts"),
    [
        (reads_all, ((0, 16),)),
        (adds_what_is_later, ((0, 16), (16, 32))),
        (add_bias, ((0, 8), (8, 40))),
        (add_bias, ((16, 1), (32, 16))),
    ],
    ids=["the result is used", "an argument is made later", "no multiple of 16", "one column"],
)
def test_leaves_alone(follow, parts, rng):
    """The columns are then copies, and right."""
    mod = of_a_product(follow, parts)
    kernels, run = built(mod)
    assert [k.name for k in kernels if "columns" in k.name and "matmul" in k.name] == []
    x, w, *biases = arrays(rng, mod, 3)
    y = x.astype("float64") @ w
    for part, (first, count), bias in zip(run(x, w, *biases), parts, biases, strict=True):
        want = y[:, first : first + count]
        if follow is reads_all:
            want = np.concatenate([want, y], 1)
        elif follow is add_bias:
            want = np.maximum(want + bias, 0)
        else:
            want = want + np.exp(bias) / np.exp(bias.astype("float64")).sum()
        close(part, want)


def test_does_not_write_to_its_input():
    """Nor where no kernel comes of it."""
    passes = [t() for t in (relax.transform.LegalizeOps, relax.transform.FuseTIR)]
    mod = tvm.transform.Sequential(passes)(of_a_product(lambda bb, part, *_: part, ((0, 8),)))
    main = mod["main"]
    StoreColumns()(mod)
    assert mod["main"].same_as(main)


def test_leaves_kernels_without_columns_alone():
    mod = relax.transform.LegalizeOps()(products())
    assert_structural_equal(StoreColumns()(mod), mod)


@pytest.mark.parametrize("activation", [None, "int8", "bfloat16"])
@pytest.mark.parametrize("rows", [None, 1, 40])
def test_a_build_has_one_kernel_for_q_k_and_v(rng, rows, activation):
    """With biases, and views and transposes behind them, for any number of rows and for one."""

    def make(bb, x, weights, product):
        results = []
        for name, weight in weights.items():
            part = bb.emit(OP.add(product(x, weight), relax.const(np.float32([1] * SIZES[name]))))
            b, s, n = part.ty.shape
            heads = bb.emit(OP.reshape(part, (b, s, int(n) // 16, 16)))
            results.append(bb.emit(OP.permute_dims(heads, [0, 2, 1, 3])))
        return results

    mod = products(make=make, rows=rows)
    values = values_of(rng, mod)
    config = Config(quant=QuantSpec(group_size=32, activation=activation))
    bound = relax.transform.BindParams("main", values)(mod)
    kernels, run = built(QuantizeMatmulWeights(config, order="vectors")(bound))
    (kernel,) = (k for k in kernels if "matmul" in k.name)
    assert kernel.family == "Matmul"
    x = rng.standard_normal((2, rows or 3, 64)).astype("float32")
    got = run(x)
    exact = {None: 2e-6, "int8": 2e-2, "bfloat16": 2e-2}[activation]
    for part, weight in zip(got, values.values(), strict=True):
        want = x.astype("float64") @ restored(weight, G32).T + 1
        want = want.reshape(*x.shape[:2], -1, 16).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(part, want, rtol=0, atol=exact * np.abs(want).max())
