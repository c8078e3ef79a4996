"""NormalizeNegativeIndices: an index of -1 reads the last element, at any shape, or is an error."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import sits_tvm
from relax_passes.normalize_negative_indices import NormalizeNegativeIndices
from sits_tvm.diagnostics import collect


def verify(before, expected):
    digest = tvm_ffi.structural_hash(before)
    assert_structural_equal(NormalizeNegativeIndices()(before), expected)
    assert tvm_ffi.structural_hash(before) == digest


def test_adds_the_length_of_the_axis():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((5, 8), "float32")) -> R.Tensor((5, 2), "float32"):
            return R.take(x, R.const([-1, 0], "int64"), axis=1)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((5, 8), "float32")) -> R.Tensor((5, 2), "float32"):
            return R.take(x, R.const([7, 0], "int64"), axis=1)

    verify(Before, Expected)


def test_the_gradient_goes_to_the_row_that_was_read(rng):
    @I.ir_module
    class Lookup:
        @R.function
        def main(x: R.Tensor((3, 4), "float32")) -> R.Tensor((), "float32"):
            return R.sum(R.take(x, R.const([-1, 0], "int64"), axis=0))

    ex = sits_tvm.build(sits_tvm.differentiate(Lookup), "llvm -mcpu=native")
    x = tvm.runtime.tensor(rng.standard_normal((3, 4)).astype("float32"))
    _, (gradient,) = relax.VirtualMachine(ex, tvm.cpu())["main_adjoint"](x)
    np.testing.assert_array_equal(gradient.numpy(), np.repeat([[1], [0], [1]], 4, axis=1))


def test_symbolic_axis_of_a_scalar_index():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32")) -> R.Tensor((8,), "float32"):
            return R.take(x, R.const(-1, "int64"), axis=0)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32")) -> R.Tensor((8,), "float32"):
            n = T.int64()
            return R.take(x, n - 1, axis=0)

    verify(Before, Expected)


def test_leaves_other_modes_and_run_time_indices_alone():
    """Modes wrap, clip and nan define a negative index; run-time values are the user's."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((5, 8), "float32"), i: R.Tensor((2,), "int64")):
            with R.dataflow():
                a = R.take(x, R.const([-1, 0], "int64"), axis=0, mode="clip")
                b = R.take(x, i, axis=0)
                c = R.take(x, R.const([1, 0], "int64"), axis=0)
                R.output(a, b, c)
            return a, b, c

    verify(Before, Before)


def test_says_which_index_lies_outside():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((5, 8), "float32")):
            with R.dataflow():
                row = R.take(x, R.const([1, -6], "int64"), axis=0)
                column = R.take(x, R.const(8, "int64"), axis=1)
                R.output(row, column)
            return row, column

    with collect() as found:
        NormalizeNegativeIndices()(Before)
    assert [(d.code, d.binding) for d in found] == [
        ("index-out-of-bounds", "row"),
        ("index-out-of-bounds", "column"),
    ]
    assert "index -6 of an axis of length 5" in found[0].message
    assert found[0].help == "write an index from -5 to 4"


def const(values):
    return relax.const(np.array(values), "int64")


X = np.arange(24, dtype="float32").reshape(4, 6)
PUT = X.copy()
PUT[[-1, 0], [0, -1]] = [70, 80]
GATHERS = {
    "take": (lambda x: op.take(x, const([-1, 0]), 0), X[[-1, 0]]),
    "take scalar": (lambda x: op.take(x, const(-2), 0), X[-2]),
    "take 2-D": (lambda x: op.take(x, const([[-1, 0], [2, -3]]), 1), X[:, [[-1, 0], [2, -3]]]),
    "gather_elements": (
        lambda x: op.gather_elements(x, const([[-1, -2, -3]]), 0),
        X[[[-1, -2, -3]], [0, 1, 2]],
    ),
    "gather_nd": (lambda x: op.gather_nd(x, const([[-1, 0], [0, -1]])), X[[-1, 0], [0, -1]]),
    "index_tensor": (
        lambda x: op.index_tensor(x, [const([-1, 0]), const([-2, 0])]),
        X[[-1, 0], [-2, 0]],
    ),
    "scatter_nd": (
        lambda x: op.scatter_nd(
            x, const([[-1, 0], [0, -1]]), relax.const(np.array([70, 80], "float32"))
        ),
        PUT,
    ),
}


def run(function, *inputs, dims=None):
    """`function` of tensors, normalized and built; `dims` is the shape of the first."""
    bb = relax.BlockBuilder()
    shapes = [list(x.shape) for x in inputs]
    shapes[0] = shapes[0] if dims is None else dims
    pairs = zip(shapes, inputs, strict=True)
    xs = [relax.Var(f"x{i}", relax.TensorType(s, str(x.dtype))) for i, (s, x) in enumerate(pairs)]
    with bb.function("main", xs):
        with bb.dataflow():
            out = bb.emit_output(function(*xs))
        bb.emit_func_output(out)
    mod = NormalizeNegativeIndices()(bb.get())
    return relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](*inputs).numpy()


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", GATHERS)
def test_same_numbers_as_numpy(name, symbolic):
    function, want = GATHERS[name]
    dims = [tvm.tirx.Var("n", "int64"), tvm.tirx.Var("m", "int64")] if symbolic else None
    np.testing.assert_array_equal(run(function, X, dims=dims), want)
