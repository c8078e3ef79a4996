"""Modules with several products of one input, for the tests of QuantizeMatmulWeights and builds."""

import numpy as np
from quantized_matmul import OP
from tvm import relax, tirx

from sits_tvm import QuantSpec
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack

ASYMMETRIC = QuantSpec(group_size=32, symmetric=False)
SIZES = {"q": 64, "k": 16, "v": 16}
"""Output channels, of grouped-query attention."""


def products(sizes=SIZES, make=None, *, rows=None, k=64, dtype="float32", transposed=False):
    """main(x, *weights) of ``make(bb, x, {name: weight of (n, k)}, product)``; all by default."""
    bb, rows = relax.BlockBuilder(), tirx.Var("s", "int64") if rows is None else rows
    x = relax.Var("x", relax.TensorType((2, rows, k), dtype))
    weights = {
        name: relax.Var(name, relax.TensorType((k, n) if transposed else (n, k), dtype))
        for name, n in sizes.items()
    }

    def product(x, weight):
        return bb.emit(OP.matmul(x, weight if transposed else bb.emit(OP.permute_dims(weight))))

    def all_products(bb, x, weights, product):
        return [product(x, weight) for weight in weights.values()]

    with bb.function("main", [x, *weights.values()], attrs={"num_input": 1}):
        with bb.dataflow():
            results = (make or all_products)(bb, x, weights, product)
            result = bb.emit_output(relax.Tuple(results))
        bb.emit_func_output(result)
    return bb.get()


def values_of(rng, mod):
    """Of each weight of main, by name."""
    return {
        p.name: rng.standard_normal([int(d) for d in p.ty.shape]).astype(str(p.ty.dtype))
        for p in mod["main"].params[1:]
    }


def product_in_float64(x, weight, spec):
    layout = PackedLayout(*weight.shape, spec)
    return x.astype("float64") @ unpack(pack(weight, spec), layout).T.astype("float64")


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
