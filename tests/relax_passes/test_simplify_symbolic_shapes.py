"""SimplifySymbolicShapes: bounds decide shapes; what stays unknown is an error, all of it."""

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
from relax_passes.simplify_symbolic_shapes import SimplifySymbolicShapes
from sits_tvm.diagnostics import collect


def verify(before, expected):
    digest = tvm_ffi.structural_hash(before)
    with collect() as found:
        after = SimplifySymbolicShapes()(before)
        again = SimplifySymbolicShapes()(after)
    assert not found
    assert_structural_equal(after, expected)
    assert_structural_equal(again, after)
    assert tvm_ffi.structural_hash(before) == digest


@I.ir_module
class Slices:
    @R.function
    def main(x: R.Tensor((1, "s"), "float32"), table: R.Tensor((1, 64), "float32")):
        s = T.int64()
        R.func_attr({"tir_var_lower_bound": {"s": 2}, "tir_var_upper_bound": {"s": 64}})
        with R.dataflow():
            last = R.strided_slice(x, (1,), (-1,), (9223372036854775807,), (1,))
            rows = R.strided_slice(table, (1,), (0,), (s,), (1,))
            moved = R.add(last, x)
            y = R.add(moved, rows)
            R.output(y)
        return y


def test_slices_inside_the_bounds():
    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, "s"), "float32"), table: R.Tensor((1, 64), "float32")):
            s = T.int64()
            R.func_attr({"tir_var_lower_bound": {"s": 2}, "tir_var_upper_bound": {"s": 64}})
            with R.dataflow():
                last = R.strided_slice(x, (1,), (s - 1,), (s,), (1,), assume_inbound=True)
                rows = R.strided_slice(table, (1,), (0,), (s,), (1,), assume_inbound=True)
                moved = R.add(last, x)
                y = R.add(moved, rows)
                R.output(y)
            return y

    verify(Slices, Expected)


def test_other_ops_are_cast_to_the_simpler_shape():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("s",), "float32")):
            s = T.int64()
            R.func_attr({"tir_var_upper_bound": {"s": 64}})
            with R.dataflow():
                a = R.arange(0, T.min(s, 64), 1, "float32")
                y = R.add(a, x)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor(("s",), "float32")):
            s = T.int64()
            R.func_attr({"tir_var_upper_bound": {"s": 64}})
            with R.dataflow():
                a = R.arange(0, T.min(s, 64), 1, "float32")
                b = R.match_cast(a, R.Tensor((s,), "float32"))
                y = R.add(b, x)
                R.output(y)
            return y

    verify(Before, Expected)


def test_leaves_alone_what_the_bounds_do_not_decide():
    """A slice of 10 of s ≥ 2 elements has min(10, s); nothing needs it simpler."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("s",), "float32")):
            s = T.int64()
            R.func_attr({"tir_var_lower_bound": {"s": 2}})
            with R.dataflow():
                y = R.strided_slice(x, (0,), (0,), (10,), (1,))
                R.output(y)
            return y

    verify(Before, Before)


def test_lists_every_unknown_shape():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, "s"), "float32"), z: R.Tensor((1, "n"), "float32")):
            with R.dataflow():
                first = R.strided_slice(x, (1,), (0,), (1,), (1,))
                y = R.add(first, x)
                w = R.multiply(z, x)
                R.output(y, w)
            return y, w

    with collect() as found:
        SimplifySymbolicShapes()(Before)
    assert [(d.code, d.function, d.binding) for d in found] == [
        ("shape-unknown", "main", "y"),
        ("shape-unknown", "main", "w"),
    ]
    assert "R.multiply" in found[1].message
    assert "tir_var_lower_bound" in found[0].help


def test_shapes_that_are_read_at_run_time_are_no_error():
    x, bb = relax.Var("x", relax.TensorType(dtype="float32")), relax.BlockBuilder()
    with bb.function("main", [x]):
        extent = relax.Call(tvm.ir.Op.get("relax.inspect.tensor_shape_i"), [x, relax.prim_value(1)])
        bb.emit_func_output(bb.emit(extent))
    verify(bb.get(), bb.get())
    vm = relax.VirtualMachine(sits_tvm.build(bb.get(), "llvm"), tvm.cpu())
    assert vm["main"](np.zeros((2, 5, 3), "float32")) == 5


def test_ops_that_depend_on_data_are_no_error():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "int64")):
            n = T.int64()
            with R.dataflow():
                u = R.unique(x, sorted=True, return_index=False, return_inverse=False)
                y = R.match_cast(u, R.Tensor((n,), "int64"))
                R.output(y)
            return y

    verify(Before, Before)


@pytest.mark.parametrize("length", [2, 3, 64])
def test_same_numbers_as_numpy(length):
    x = np.arange(length, dtype="float32")[None]
    table = np.arange(64, dtype="float32")[None] ** 2
    mod = SimplifySymbolicShapes()(Slices)
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    want = x[:, -1:] + x + table[:, :length]
    np.testing.assert_array_equal(vm["main"](x, table).numpy(), want)
