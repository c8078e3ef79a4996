import tvm_ffi
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes import RemoveStopGradients


def verify(before, expected):
    digest = tvm_ffi.structural_hash(before)
    assert_structural_equal(RemoveStopGradients()(before), expected)
    assert tvm_ffi.structural_hash(before) == digest


def test_removes_chains_and_results():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                a = R.grad.no_grad(x)
                b = R.grad.no_grad(a)
                y = R.exp(b)
                z = R.grad.no_grad(y)
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                y = R.exp(x)
                R.output(y)
            return y

    verify(Before, Expected)


def test_leaves_other_modules_alone():
    """Also the second name of a value, which front ends emit."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                y = R.exp(x)
                z = y
                R.output(z)
            return z

    verify(Before, Before)
