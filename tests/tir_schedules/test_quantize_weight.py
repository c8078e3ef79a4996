"""The kernels behind `<func>_transform_params` against the NumPy format, bit for bit."""

import itertools

import numpy as np
import pytest
import tvm

from sits_tvm import QuantSpec
from tir_schedules.int4_format.packing import PackedLayout, pack
from tir_schedules.quantization.quantize_weight import choose_scale, pack_codes, pack_zero_points

CASES = [
    (shape, QuantSpec(bits=bits, group_size=g, symmetric=s, scale_method=m), order, dtype)
    for bits, shape, g, s, m, order, dtype in [
        (4, (33, 72), 32, True, "absmax", "vectors", "float32"),
        (4, (33, 72), 32, False, "absmax", "vectors", "float16"),
        (4, (16, 256), 128, False, "mse", "vectors", "float32"),
        (4, (16, 256), 64, True, "mse", "rows", "float16"),
        (3, (33, 72), 32, True, "mse", "vectors", "float32"),
        (2, (33, 72), 32, False, "absmax", "rows", "float32"),
        (4, (5, 100), -1, False, "absmax", "rows", "float32"),
        (4, (33, 72), 32, False, "absmax", "fragments", "float16"),
        (3, (33, 100), -1, True, "mse", "fragments", "float32"),
    ]
]
CASES += [
    (shape, QuantSpec(group_size=g, symmetric=s, activation="int8"), "fragments", dtype)
    for shape, g, s, dtype in [((33, 72), 32, False, "float32"), ((20, 200), -1, True, "float16")]
]


def run(kernel, *arrays):
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")["main"](*tensors)
    return [tensor.numpy() for tensor in tensors]


@pytest.mark.parametrize(("shape", "spec", "order", "dtype"), CASES, ids=str)
def test_same_bits(rng, shape, spec, order, dtype):
    layout = PackedLayout(*shape, spec, order)
    weight = (rng.standard_normal(shape) * 0.02).astype(dtype)
    weight[3] = 0
    weight[4] *= 1e-3
    blank = [np.zeros(s, d) for s, d in zip(layout.shapes, layout.dtypes, strict=True)]
    _, scale, zero = run(
        choose_scale(layout, dtype), weight, blank[1], np.zeros(layout.shapes[1], "uint8")
    )
    codes = run(pack_codes(layout, dtype), weight, scale, zero, blank[0])[-1]
    got = [codes, scale]
    if not spec.symmetric:
        got += run(pack_zero_points(layout), zero, blank[2])[-1:]
    for ours, expected in itertools.zip_longest(got, pack(weight, spec, order)):
        np.testing.assert_array_equal(ours, expected)
