"""NameVariables: kernels whose arguments have names of C."""

import numpy as np
import pytest
from tvm import relax
from tvm.ir import assert_structural_equal

import sits_tvm
from relax_passes._name_variables import NameVariables, identifier
from sits_tvm import Config, QuantSpec


def linear(*names):
    """A product whose input, weight, bias and binding have these names."""
    types = [relax.TensorType(shape, "float16") for shape in ((4, 64), (32, 64), (32,))]
    x, w, b = [relax.Var(name, of) for name, of in zip(names, types, strict=False)]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w, b], attrs={"num_input": 1}):
        with builder.dataflow():
            wt = builder.emit(relax.op.permute_dims(w))
            y = builder.emit(relax.op.matmul(x, wt), names[3])
            y = builder.emit_output(relax.op.add(relax.op.nn.softmax(y), b))
        builder.emit_func_output(y)
    return builder.get()


def names_in(func):
    bindings = [binding.var for block in func.body.blocks for binding in block.bindings]
    return [var.name for var in (*func.params, *bindings)]


@pytest.mark.parametrize("names", [("x", "0.weight", "a/b", "1 y"), ("é", "-", "_", "y")])
def test_kernels_for_cuda_compile_whatever_the_names(names):
    """nvcc compiles them: `build` refuses what it does not."""
    mod = linear(*names)
    params = {names[1]: np.ones((32, 64), "float16"), names[2]: np.ones(32, "float16")}
    config = Config(quant=QuantSpec(group_size=32))
    ex = sits_tvm.build(mod, "cuda -arch=sm_90", params=params, config=config)
    assert [list(param.shape) for param in ex.param_list] == [[2, 1, 128], [2, 2, 16], [32]]


def test_only_names_change():
    mod = linear("x", "0.weight", "a/b", "1 y")
    renamed = NameVariables()(mod)
    assert names_in(renamed["main"]) == [identifier(name) for name in names_in(mod["main"])]
    assert names_in(renamed["main"])[:3] == ["x", "_0_weight", "a_b"]
    assert_structural_equal(renamed, mod)


def test_leaves_a_module_of_identifiers_as_it_is():
    mod = linear("x", "w", "b", "y")
    assert NameVariables()(mod).same_as(mod)
