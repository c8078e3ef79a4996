"""Attention as a function without a schedule: right by float64 NumPy, and it tells what it is."""

import numpy as np
import pytest
import tvm
from attention_runs import call, reference, symbolic_types
from kernel_runs import target

from tir_schedules.attention.rule import attention_kernel
from tir_schedules.attention.spec import attention_spec, spec_of

ATOL = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 2e-2}
LENGTHS = [(1, 9), (5, 5), (9, 1), (24, 70), (0, 5), (3, 0)]
ATTRIBUTES = [
    {},
    {"causal": "bottom_right", "window": 7, "empty_row": "uniform"},
    {"causal": 3, "window": 2, "softcap": 0.7},
    {"causal": -2, "scale": 1.0, "empty_row": "zero"},
]


def operands(rng, queries, keys, dtype, bias):
    shapes = (2, 6, queries, 12), (2, 2, keys, 12), (2, 2, keys, 7)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    if bias is None:
        return arrays
    shown = rng.random((2, 1, queries, keys)) < 0.6
    values = np.where(shown, rng.standard_normal(shown.shape), -np.inf)
    return [*arrays, shown if bias == "bool" else values.astype(bias)]


@pytest.mark.parametrize(("dtype", "bias"), [
    ("float32", None), ("float16", "bool"), ("bfloat16", "float32"),
])  # fmt: skip
@pytest.mark.parametrize("attributes", ATTRIBUTES, ids=str)
def test_is_what_the_op_means(rng, attributes, dtype, bias):
    types = symbolic_types(operands(rng, 5, 9, dtype, bias))
    func = attention_kernel(call(types, **attributes), target())
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    plain = tvm.compile(mod, target())["main"]
    for queries, keys in LENGTHS:
        arrays = operands(rng, queries, keys, dtype, bias)
        out = tvm.runtime.tensor(np.full((2, 6, queries, 7), 7, dtype))
        plain(*map(tvm.runtime.tensor, arrays), out)
        expected = reference(*arrays, **attributes)
        np.testing.assert_allclose(out.numpy().astype("float64"), expected, atol=ATOL[dtype])


@pytest.mark.parametrize("attributes", ATTRIBUTES, ids=str)
def test_tells_what_it_computes(rng, attributes):
    """Also after a round trip through JSON, which candidates of `tune` take."""
    made = call(symbolic_types(operands(rng, 5, 9, "float16", "bool")), **attributes)
    func = attention_kernel(made, target())
    read = tvm.ir.load_json(tvm.ir.save_json(tvm.IRModule({"main": func})))["main"]
    for other in (func, read):
        spec = spec_of(other)
        assert spec.attributes == attention_spec(made).attributes
        assert [str(buffer.dtype) for buffer in spec.arguments] == ["float16"] * 3 + ["bool"] + [
            "float16"
        ]
        assert all(a.same_as(b) for a, b in zip(spec.arguments, other.params, strict=True))
    assert spec_of(func.without_attr("sits.attention")) is None
