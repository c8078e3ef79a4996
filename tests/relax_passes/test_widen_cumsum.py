"""WidenCumsum: scans of a bool run in int64; every other scan stays as it is."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes.widen_cumsum import WidenCumsum


def verify(before, expected):
    digest = tvm_ffi.structural_hash(before)
    assert_structural_equal(WidenCumsum()(before), expected)
    assert tvm_ffi.structural_hash(before) == digest


def test_widens_and_infers_the_types_behind_it():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, "n"), "bool")):
            with R.dataflow():
                y = R.cumsum(x, axis=1, exclusive=True)
                z = R.add(y, y)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((4, "n"), "bool")):
            with R.dataflow():
                y = R.cumsum(x, axis=1, dtype="int64", exclusive=True)
                z = R.add(y, y)
                R.output(z)
            return z

    verify(Before, Expected)
    assert WidenCumsum()(Before)["main"].ret_ty.dtype == "int64"


def test_an_explicit_bool_stays_the_type_of_the_result():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "bool")) -> R.Tensor((4,), "bool"):
            with R.dataflow():
                y = R.cumprod(x, axis=0, dtype="bool")
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((4,), "bool")) -> R.Tensor((4,), "bool"):
            with R.dataflow():
                wide = R.cumprod(x, axis=0, dtype="int64")
                y = R.astype(wide, "bool")
                R.output(y)
            return y

    verify(Before, Expected)


def test_leaves_integers_floats_and_wide_scans_alone():
    """An int32 scan wraps around by Relax's definition; a bool scan with a dtype has one."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "int32"), y: R.Tensor((4,), "bool")):
            with R.dataflow():
                a = R.cumsum(x, axis=0)
                b = R.cumsum(y, axis=0, dtype="float32")
                R.output(a, b)
            return a, b

    verify(Before, Before)


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_same_numbers_as_numpy(name):
    x = np.array([[True, True, False], [True, False, True]])
    bb = relax.BlockBuilder()
    var = relax.Var("x", relax.TensorType(x.shape, "bool"))
    with bb.function("main", [var]):
        bb.emit_func_output(bb.emit(getattr(relax.op, name)(var, 1)))
    mod = WidenCumsum()(bb.get())
    got = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](x).numpy()
    np.testing.assert_array_equal(got, getattr(np, name)(x, axis=1, dtype="int64"))
